//! A daemon of Godwit's: started in a site, killed, started again.

use crate::fabric::Site;
use anyhow::{Context, Result};
use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// One daemon, running or not; killed on drop.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    binary: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    log: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    /// Not started yet. `name` is for people; standard error goes to `log`.
    #[must_use]
    pub fn new(name: &str, binary: &Path, arguments: Vec<OsString>, log: PathBuf) -> Self {
        Self { name: name.to_owned(), binary: binary.to_owned(), arguments, environment: vec![], log, process: None }
    }

    /// With a variable set.
    #[must_use]
    pub fn with_environment(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// What it is called in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where its words go.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Starts it in `site`. What it said in an earlier life stays in its log.
    ///
    /// # Errors
    /// When it cannot be started; whether it then works has to be asked.
    pub fn start(&mut self, site: &Site) -> Result<()> {
        self.kill();
        let context = || format!("cannot start {}", self.name);
        let log = OpenOptions::new().create(true).append(true).open(&self.log).with_context(context)?;
        let mut command = Command::new(&self.binary);
        command.args(&self.arguments).envs(self.environment.iter().map(|(k, v)| (k, v)));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(site.ns.run(move || command.spawn()).with_context(context)?);
        Ok(())
    }

    /// How it ended, if it was started, was not killed by us, and has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.as_mut()?.try_wait().ok()?
    }

    /// Kills it (SIGKILL), and waits until it is gone. Not an error when it is gone already.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}
