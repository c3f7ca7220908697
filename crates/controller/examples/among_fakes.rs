//! A controller among fake nodes, with a VM and a move under way, for programs that ask it from outside: prints where it listens and
//! the folder of an admin's certificate, and ends when its standard input does.

#![allow(clippy::unwrap_used, reason = "it serves tests, and fails as they do")]

#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/fakes/mod.rs"]
mod fakes;

use fakes::World;
use godwit_trust::{Access, Role};
use std::io::Read;

#[tokio::main]
async fn main() {
    let world = World::new().await;
    world.web().await;
    world.order("texas").await.unwrap();
    // Not as anybody in the API document's examples: the program that asks would revoke itself.
    world.credentials(Role::Client(Access::Admin), "fuzzer");
    println!("{} {}", world.controller_address(), world.folder(Role::Client(Access::Admin), "fuzzer").display());
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut vec![]));
    ended.await.unwrap().unwrap();
}
