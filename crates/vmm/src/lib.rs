//! The hypervisor driver: QEMU, by its command line and QMP.
//!
//! A QEMU that the node starts does not belong to it: it has a session of its own, its control socket and process id are in
//! files, and a node that starts again finds it by them ([`Qemu::adopt`]). Its disks are NBD clients of the node with a
//! reconnect delay, so its guest waits for a restarting node instead of seeing errors.
//!
//! # What can go wrong
//!
//! *A process id is used again.* It is kept with the process's start time, and both have to match before it is believed or
//! killed.
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
//! *The monitor does not answer* while QEMU stops for the last pages. Events still come, each with QEMU's own time.

mod command;
mod error;
mod facts;
mod process;
mod qemu;
pub mod spec;

pub use error::VmmError;
pub use facts::{Cpus, HostFacts, Unmet, Version, check};
pub use qemu::{MigrationInfo, MigrationStatus, Qemu, QemuEvent, State};
pub use spec::{Accel, Boot, Disk, Nic, Placement, Start, VmSpec};
