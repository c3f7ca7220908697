//! What controller, node and command line say to each other.
