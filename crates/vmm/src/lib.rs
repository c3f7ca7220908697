//! The hypervisor driver: QEMU, by its command line and QMP.
//!
//! A QEMU that the node starts does not belong to it: it is no child of the node's and has a process group of its own, it writes its process id to a file that
//! stands on its command line, and a node that starts again finds it by that ([`Qemu::adopt`]). Its disks are NBD clients of the node with a
//! reconnect delay, so its guest waits for a restarting node instead of seeing errors.
//!
//! # What can go wrong
//!
//! *A node is killed while it starts a QEMU.* Whatever the moment, the process has its place on its command line, and is found.
//!
//! *A process id is used again.* It is believed only of a process with the right command line, and kept with the process's start
//! time, which has to match before it is killed.
//!
//! *A source resumes by itself.* QEMU does so when its return path breaks before SHUT; after SHUT it is in `postmigrate` and only
//! [`Qemu::cont`] starts it again. `tests/qemu.rs` shows both.
//!
//! *A destination runs by itself.* It is started with `-S` and `late-block-activate`: it stays paused, its disks inactive,
//! until [`Qemu::cont`].
//!
//! *TCG before QEMU 10 loses dirty pages* where a block of RAM is a multiple of 256 KiB; such a VM is refused
//! ([`spec::VmSpec::check`]).
//!
//! *A source's post-copy has begun.* QEMU has no command to take that back, and a way all the same: [`Qemu::go_back`].
//!
//! *The monitor does not answer* while QEMU stops for the last pages. Events still come, each with QEMU's own time.
//!
//! *The monitor breaks, or cannot be reached at all.* The guest is not given up for that: the connection is made again for as
//! long as the process is there, and commands fail with [`VmmError::Unreachable`] until it is.

mod command;
pub mod console;
mod error;
mod facts;
mod go_back;
mod monitor;
mod process;
mod qemu;
pub mod spec;

pub use error::VmmError;
pub use facts::{Cpus, HostFacts, Unmet, Version, check};
pub use process::{end, is_running};
pub use qemu::{MigrationInfo, MigrationStatus, Qemu, QemuEvent, State};
pub use spec::{Accel, Boot, Disk, Nic, Placement, Start, VmSpec};
