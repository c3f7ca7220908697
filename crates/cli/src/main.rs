//! The one binary: `godwit controller`, `godwit node`, and the user's commands.

#![forbid(unsafe_code)]

mod args;
mod component;
mod config;
mod daemons;
mod enrol;
mod evacuation;
mod events;
mod failure;
mod follow;
mod foretell;
mod image;
mod net;
mod predict;
mod profile;
mod promote;
mod quantity;
mod rewire;
mod service;
mod show;
mod spec;
mod stream;
mod table;
mod timeline;
mod together;
mod user;
mod verify;
mod volume;
mod wire;

use args::{Api, Cli, Command, ConfigCommand};
use clap::{CommandFactory, Parser};
use failure::Failure;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.message.is_empty() {
                eprintln!("godwit: {failure}");
            }
            ExitCode::from(failure.code as u8)
        }
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    let Cli { global, command } = cli;
    match command {
        Command::Pki(command) => daemons::pki(&command),
        Command::Api(Api::Spec) => follow::print_text(&godwit_api::openapi::text()),
        Command::Controller(args) => daemons::controller(args, &global),
        Command::Node(args) => daemons::node(args, &global),
        Command::Config(ConfigCommand::Check { file, kind }) => config::check(&file, kind),
        Command::Init(args) => enrol::init(&global, &args),
        Command::Enroll(args) => enrol::enrol(&global, &args),
        Command::Stream(command) => stream::run(command),
        Command::Volume(command) => volume::run(&global, command),
        Command::Predict(args) if !args.asks() => predict::run(&global, &args),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "godwit", &mut std::io::stdout());
            Ok(())
        }
        Command::Man { out } => {
            std::fs::create_dir_all(&out)?;
            Ok(clap_mangen::generate_to(Cli::command(), &out)?)
        }
        command => user::run(&global, command),
    }
}
