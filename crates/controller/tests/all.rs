//! The controller among fake nodes, in one program: each by itself took half a minute to compile.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod fakes;

mod among_nodes;
mod crashes;
mod domains;
mod observed;
mod wires;
