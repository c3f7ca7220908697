//! All tests of the program in one program: each by itself took ten seconds to compile. Tests of one file that need a machine's processors go one after
//! the other; those of others go on beside them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

mod binary;
mod claims;
mod components;
mod dependencies;
mod device;
mod evacuation;
mod extenders;
mod foretell;
mod image;
mod leftovers;
mod memory;
mod netcheck;
mod nodes;
mod policies;
mod postcopy;
mod predict;
mod promote;
mod rados;
mod serve;
mod service;
mod shared;
mod stream;
mod trust;
mod units;
mod upgrade;
mod verify;
mod versions;
mod wires;
