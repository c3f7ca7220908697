//! A WAN path in user space: joins two network interfaces at layer 2 and gives each direction a rate, a delay, jitter,
//! loss and a drop-tail queue.
//!
//! # Why not the kernel's own
//!
//! `tc netem` is the usual tool, and many kernels are built without it: CI machines and micro-VMs above all. No other
//! qdisc can delay a packet. So a thread per direction reads frames from one interface with `AF_PACKET`, decides their
//! fate, keeps them until they are due and writes them to the other interface. That also yields what netem cannot
//! give: byte counts by traffic class, taken at the very place where the WAN begins.
//!
//! # How a frame travels
//!
//! ```text
//!  site A          |              the emulator's namespace              |         site B
//!  a1 ===veth===== a0 --> PacketSocket --> frame --> Shaper --> Flight --> PacketSocket --> b0 =====veth=== b1
//!                         (arrival stamp)  (bytes,   (fate and  (until
//!                                           class)    moment)    due)
//! ```
//!
//! - [`frame`] reads a frame's headers: how many packets it stands for, how many bytes they occupy on a wire, its ports.
//! - [`class`] turns ports into a traffic class.
//! - [`shaper`] is the model of the line, and all of it: deterministic, with neither clock nor socket.
//! - [`flight`] holds what is under way, in order of departure, within a bound.
//! - [`packet_socket`] and [`realtime`] are the doors to the kernel, and the only files with `unsafe`.
//! - [`path`] is the thin shell that ties them together in two threads.
//! - [`counters`] says what passed and what did not, and why.
//! - [`alter`] damages a frame on purpose, to see that somebody notices.
//! - [`offload`] makes a sender segment before frames reach the path; loss is only honest then.
//!
//! # What to keep in mind
//!
//! - **Super-frames.** Linux hands segments to a veth in lumps of up to 64 KiB. The path charges them as the packets
//!   they stand for, but can only lose or delay a lump as a whole. Where [`PathSpec::needs_single_packets`] says so, run
//!   [`set_segmentation`] in the senders' namespaces; [`DirectionCounters::superframes_under_loss`] tells when that was forgotten.
//! - **The ends stay bare.** The two interfaces in the emulator's namespace need no address, and IPv6 is best disabled
//!   there (`net.ipv6.conf.all.disable_ipv6=1`), lest the namespace's own stack talks to the sites.
//! - **Time.** Frames are judged by the kernel's arrival stamp, not by when a thread got round to reading them, so a
//!   busy machine delays packets without distorting rate or queue. [`DirectionCounters::late`] counts what left late.

pub mod alter;
pub mod class;
pub mod counters;
mod error;
pub mod flight;
pub mod frame;
pub mod offload;
pub mod packet_socket;
pub mod path;
pub mod realtime;
pub mod shaper;
mod spec;

pub use class::{Class, Classifier, PerClass};
pub use counters::{ClassCounters, Counters, DirectionCounters, Tally};
pub use error::WanError;
pub use offload::{Offload, set_segmentation};
pub use path::Path;
pub use realtime::Scheduling;
pub use shaper::Moment;
pub use spec::PathSpec;
