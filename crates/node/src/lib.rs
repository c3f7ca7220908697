//! The daemon of a host: the data path of a move.
