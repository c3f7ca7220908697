//! What controller, node and command line say to each other: HTTP/1.1 with JSON over mutual TLS.
//!
//! The controller serves people ([`public`]); each node serves the controller ([`host`]). Both speak of the same
//! things, which are here too: a VM's definition ([`vm`]), and how a move stands ([`progress`]).

#![forbid(unsafe_code)]

pub mod canonical;
pub mod capture;
pub mod client;
pub mod clients;
pub mod component;
pub mod error;
pub mod evacuation;
pub mod events;
pub mod extender;
pub mod hex;
pub mod host;
pub mod image;
pub mod metrics;
pub mod name;
pub mod network;
pub mod openapi;
pub mod orphan;
mod patterns;
pub mod precache;
pub mod predict;
pub mod profile;
pub mod progress;
pub mod promote;
pub mod public;
mod refusal;
pub mod server;
pub mod trust;
pub mod verify;
pub mod vm;
pub mod wire;

pub use client::Client;
pub use clients::{HostClient, PublicClient};
pub use error::{ApiError, Problem};
pub use name::Name;
pub use server::{done, listen, only, require, serve, serve_anybody};
