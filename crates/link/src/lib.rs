//! The authenticated, encrypted, prioritised transport between two hosts.
