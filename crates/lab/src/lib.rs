//! The lab: sites, a WAN and real guests on one machine, and the truth about a move.
//!
//! A scenario (TOML, [`scenario`]) names sites, the WAN between them, guests and steps. A run builds it inside a sandbox
//! that leaves nothing behind ([`sandbox`], [`ns`], [`fabric`], [`guest`]), makes the moves, and writes what it measured
//! ([`report`], [`plot`], [`table`]). The lab uses Godwit as a user does, by its binary; the moves of [`qemu_move`] are what
//! QEMU does alone, the baseline of every claim.

mod application;
pub mod capture;
mod convoy;
pub mod disks;
pub mod fabric;
pub mod figures;
mod flow;
pub mod godwit;
pub mod guest;
pub mod guest_io;
pub mod images;
pub mod kvm;
pub mod ledger;
pub mod machine;
mod moves;
mod network;
pub mod ns;
pub mod papers;
pub mod pass;
pub mod plot;
pub mod precache;
mod processors;
mod profile;
pub mod progress;
pub mod qemu_move;
pub mod ram_watch;
mod reboot;
pub mod recording;
pub mod replays;
pub mod report;
pub mod run;
pub mod sandbox;
pub mod scenario;
pub mod speed;
mod steps;
pub mod sweep;
pub mod table;
pub mod truth;
pub mod watch;
