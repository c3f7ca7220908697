//! How long a move will take, how long the guest will stand, and what it will cost the link: said before anything is moved.
//!
//! After Akoush, Sohan, Rice, Moore and Hopper, "Predicting the Performance of Virtual Machine Migration" (MASCOTS 2010; "the
//! paper" here): [`bounds`] are its equations 3 and 4, [`simulate`] its algorithm 1, fed by a [`Guest`]: one that dirties pages at
//! a rate ([`Sequential`], [`Evenly`]: its model AVG) or one whose pages were watched before ([`Replayed`]: its model HIST, from a
//! [`Log`]). [`whole`] adds disks, the link as it was measured and what
//! else a move takes, and says how far off it may be. [`replay`] tries real encoders on a guest whose contents were [`recorded`]. When a hypervisor ends pre-copy is data, [`Rules`]. [`fleet`] plans a whole site's evacuation, [`figure`] draws.
//!
//! Everything here is a function of what it is given: no clock, no files, no network; [`replay`] is given a clock.
//!
//! # What can go wrong
//!
//! A prediction is as good as its figures. The link's rate is the *goodput* that a move gets, measured, not what the link is sold
//! as; overheads are measured on moves of idle guests. A rule such as QEMU's ends no move whose guest dirties memory faster
//! than the link carries it: that is [`NeverEnds`], an error, not a large number. A log that is shorter than the move is
//! repeated, which the prediction says.

#![forbid(unsafe_code)]

mod amount;
mod avg;
pub mod bounds;
pub mod figure;
pub mod fleet;
mod guest;
mod hist;
pub mod log;
pub mod recorded;
pub mod replay;
mod rules;
mod simulate;
mod turns;
pub mod whole;

pub use amount::{Overheads, PAGE, PageRate, Pages};
pub use avg::{Evenly, Sequential};
pub use bounds::{Between, Bounds, bounds};
pub use godwit_memory::levels::memory_share;
pub use guest::{Batch, Bitmaps, Cleaned, Faster, Guest};
pub use hist::{Replayed, Timeline};
pub use log::{Log, LogWriter, Observed, Taken};
pub use rules::{Condition, Judge, Judged, Redirtied, Rules, Seen};
pub use simulate::{Cost, Link, NeverEnds, Prediction, Round, Unending, Wire, simulate, simulate_on};
