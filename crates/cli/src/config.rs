//! Configuration files of the daemons: `/etc/godwit/controller.toml` and `node.toml`, one key for each option.
//!
//! A daemon reads the one file that `--config` names and no other, so what it does can be told from its command line. An
//! option on the command line wins over the file; the file wins over what is built in. A key that is not known is refused, with
//! file and line: a misspelt one would otherwise be a setting that silently is not in force.

use crate::args::{ControllerArgs, FileKind, LogFormat, NodeArgs};
use crate::extender::ExtenderAt;
use crate::failure::{Code, Failure};
use crate::profile::Routine;
use crate::quantity::time;
use godwit_api::Name;
use godwit_units::RadosPool;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing_subscriber::filter::Targets;

/// What the longest file that makes sense does not reach: a wrong name (a disk, a log) is refused before it is read whole.
const LONGEST: u64 = 1 << 20;

/// A controller's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControllerFile {
    /// Where its API listens.
    pub listen: Option<SocketAddr>,
    /// Folder of its store.
    pub state: Option<PathBuf>,
    /// Folder with `ca.pem`, `cert.pem` and `key.pem`.
    pub credentials: Option<PathBuf>,
    /// Folder of the authority.
    pub authority: Option<PathBuf>,
    /// How long the certificates last that it issues, such as `90d`.
    #[serde(default, deserialize_with = "a_time")]
    pub certificate_life: Option<Duration>,
    /// What is logged.
    pub log: Option<String>,
    /// How.
    pub log_format: Option<LogFormat>,
}

/// A node's file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeFile {
    /// The host's name.
    pub name: Option<Name>,
    /// Folder for what survives a reboot.
    pub state: Option<PathBuf>,
    /// Folder for what does not.
    pub run: Option<PathBuf>,
    /// Folder of boot files.
    pub images: Option<PathBuf>,
    /// The Ceph pool that volumes lie in that are new here.
    pub pool: Option<RadosPool>,
    /// The address that it listens on, and that tunnels end at.
    pub address: Option<IpAddr>,
    /// TCP port of its API.
    pub api: Option<u16>,
    /// UDP port for hand-offs and orders.
    pub control: Option<u16>,
    /// UDP port for disk blocks.
    pub disk: Option<u16>,
    /// UDP port for memory.
    pub memory: Option<u16>,
    /// That it can carry extenders: `outbound`, or where other sites reach it.
    pub extender: Option<ExtenderAt>,
    /// How often each guest's memory is watched: a time, or `never`.
    pub watch_every: Option<Routine>,
    /// Folder with `ca.pem`, `cert.pem` and `key.pem`.
    pub credentials: Option<PathBuf>,
    /// What is logged.
    pub log: Option<String>,
    /// How.
    pub log_format: Option<LogFormat>,
}

/// What stands in both files, and what cannot be checked by a type alone.
trait Checked {
    fn log(&self) -> Option<&str>;
    fn folders(&self) -> Vec<(&'static str, &Option<PathBuf>)>;
}

impl Checked for ControllerFile {
    fn log(&self) -> Option<&str> {
        self.log.as_deref()
    }

    fn folders(&self) -> Vec<(&'static str, &Option<PathBuf>)> {
        vec![("state", &self.state), ("credentials", &self.credentials), ("authority", &self.authority)]
    }
}

impl Checked for NodeFile {
    fn log(&self) -> Option<&str> {
        self.log.as_deref()
    }

    fn folders(&self) -> Vec<(&'static str, &Option<PathBuf>)> {
        vec![("state", &self.state), ("run", &self.run), ("images", &self.images), ("credentials", &self.credentials)]
    }
}

/// A controller's settings: what was said, or what holds when nothing is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerSettings {
    /// Where its API listens.
    pub listen: SocketAddr,
    /// Folder of its store.
    pub state: PathBuf,
    /// Folder of its credentials, where one was named.
    pub credentials: Option<PathBuf>,
    /// Folder of the authority: the one that was named, or the one in the state folder.
    pub authority: Option<PathBuf>,
    /// How long the certificates last that it issues.
    pub certificate_life: Duration,
    /// What is logged, where that was said.
    pub log: Option<String>,
    /// How.
    pub log_format: LogFormat,
}

/// How long certificates last when nobody says.
const CERTIFICATE_LIFE: Duration = Duration::from_secs(90 * 86_400);

/// A node's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSettings {
    /// The host's name; its certificate's when nobody says it.
    pub name: Option<Name>,
    /// Folder for what survives a reboot.
    pub state: PathBuf,
    /// Folder for what does not.
    pub run: PathBuf,
    /// Folder of boot files.
    pub images: PathBuf,
    /// The Ceph pool that volumes lie in that are new here.
    pub pool: Option<RadosPool>,
    /// The address that it listens on, and that tunnels end at.
    pub address: IpAddr,
    /// TCP port of its API.
    pub api: u16,
    /// UDP port for hand-offs and orders.
    pub control: u16,
    /// UDP port for disk blocks.
    pub disk: u16,
    /// UDP port for memory.
    pub memory: u16,
    /// That it can carry extenders.
    pub extender: Option<ExtenderAt>,
    /// How often each guest's memory is watched.
    pub watch_every: Routine,
    /// Folder of its credentials, where one was named.
    pub credentials: Option<PathBuf>,
    /// What is logged, where that was said.
    pub log: Option<String>,
    /// How.
    pub log_format: LogFormat,
}

/// A controller's settings; `credentials` are those of the command line.
///
/// # Errors
/// The file's; or what neither it nor the command line says.
pub fn controller(args: ControllerArgs, credentials: Option<PathBuf>) -> Result<ControllerSettings, Failure> {
    let file: ControllerFile = read_if(args.config.as_deref())?;
    let wanted = |key| missing(key, args.config.as_deref());
    let state = args.state.or(file.state).ok_or_else(|| wanted("state"))?;
    let made = Some(state.join(crate::enrol::AUTHORITY)).filter(|ca| ca.exists());
    Ok(ControllerSettings {
        listen: args.listen.or(file.listen).unwrap_or(SocketAddr::from(([127, 0, 0, 1], 7400))),
        state,
        credentials: credentials.or(file.credentials),
        authority: args.authority.or(file.authority).or(made),
        certificate_life: args.certificate_life.or(file.certificate_life).unwrap_or(CERTIFICATE_LIFE),
        log: file.log,
        log_format: args.log_format.or(file.log_format).unwrap_or_default(),
    })
}

/// A node's settings; `credentials` are those of the command line.
///
/// # Errors
/// As [`controller`].
pub fn node(args: NodeArgs, credentials: Option<PathBuf>) -> Result<NodeSettings, Failure> {
    let file: NodeFile = read_if(args.config.as_deref())?;
    let wanted = |key| missing(key, args.config.as_deref());
    Ok(NodeSettings {
        name: args.name.or(file.name),
        state: args.state.or(file.state).ok_or_else(|| wanted("state"))?,
        run: args.run.or(file.run).ok_or_else(|| wanted("run"))?,
        images: args.images.or(file.images).ok_or_else(|| wanted("images"))?,
        pool: args.pool.or(file.pool),
        address: args.address.or(file.address).ok_or_else(|| wanted("address"))?,
        api: args.api.or(file.api).unwrap_or(7410),
        control: args.control.or(file.control).unwrap_or(7411),
        disk: args.disk.or(file.disk).unwrap_or(10809),
        memory: args.memory.or(file.memory).unwrap_or(4444),
        extender: args.extender.or(file.extender),
        watch_every: args.watch_every.or(file.watch_every).unwrap_or_default(),
        credentials: credentials.or(file.credentials),
        log: file.log,
        log_format: args.log_format.or(file.log_format).unwrap_or_default(),
    })
}

/// Looks a file through as its daemon will, without starting it: what it needs and the file does not say is wrong, too.
///
/// # Errors
/// What is wrong, where, and what to do.
pub fn check(path: &Path, kind: Option<FileKind>) -> Result<(), Failure> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let kind = match kind {
        Some(kind) => kind,
        None if name.starts_with("controller") => FileKind::Controller,
        None if name.starts_with("node") => FileKind::Node,
        None => {
            return Err(Failure::usage(format!(
                "{}: for which daemon is it? say --for controller or --for node",
                path.display()
            )));
        }
    };
    let config = Some(path.to_owned());
    match kind {
        FileKind::Controller => controller(ControllerArgs { config, ..ControllerArgs::default() }, None).map(drop)?,
        FileKind::Node => node(NodeArgs { config, ..NodeArgs::default() }, None).map(drop)?,
    }
    println!("{} is in order", path.display());
    Ok(())
}

fn missing(key: &str, file: Option<&Path>) -> Failure {
    Failure::usage(match file {
        Some(file) => format!("`{key}` is not set: add `{key} = ...` to {}, or say --{key}", file.display()),
        None => format!("`{key}` is not set: say --{key}, or name a file that has it with --config"),
    })
}

fn read_if<T: DeserializeOwned + Default + Checked>(path: Option<&Path>) -> Result<T, Failure> {
    path.map_or_else(|| Ok(T::default()), read)
}

fn read<T: DeserializeOwned + Checked>(path: &Path) -> Result<T, Failure> {
    let said = |what: String| Failure::usage(format!("{}: {what}", path.display()));
    // What cannot be read now may be in a moment: a service is started again.
    let unread = |e: std::io::Error| {
        use std::io::ErrorKind as Kind;
        let lasting =
            matches!(e.kind(), Kind::NotFound | Kind::PermissionDenied | Kind::IsADirectory | Kind::NotADirectory);
        let code = if lasting { Code::Usage } else { Code::Failed };
        Failure::new(code, format!("{}: cannot be read: {e}", path.display()))
    };
    let length = std::fs::metadata(path).map_err(unread)?.len();
    if length > LONGEST {
        return Err(said(format!("has {length} bytes, which no configuration has: is it the right file?")));
    }
    let text = match std::fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => return Err(said("is no text".into())),
        read => read.map_err(unread)?,
    };
    parse(&text).map_err(|fault| {
        let place = fault.line.map_or_else(String::new, |line| format!(", line {line}"));
        Failure::usage(format!(
            "{}{place}: {}; mend it and look again with `godwit config check`",
            path.display(),
            fault.what
        ))
    })
}

#[derive(Debug)]
struct Fault {
    line: Option<usize>,
    what: String,
}

fn parse<T: DeserializeOwned + Checked>(text: &str) -> Result<T, Fault> {
    let file: T = toml::from_str(text)
        .map_err(|e| Fault { line: e.span().map(|at| line_of(text, &at)), what: plainly(e.message()) })?;
    let key = |key: &str| Some(1 + text.lines().position(|l| l.trim_start().starts_with(key))?);
    for (name, folder) in file.folders() {
        if let Some(folder) = folder
            && !folder.is_absolute()
        {
            let what = format!("`{name}` is `{}`: write the whole path, from the root", folder.display());
            return Err(Fault { line: key(name), what });
        }
    }
    if let Some(log) = file.log() {
        log_targets(log).map_err(|what| Fault { line: key("log"), what: format!("`log` is {what}") })?;
    }
    Ok(file)
}

/// A log filter, as `GODWIT_LOG` and the key `log` take it.
///
/// # Errors
/// What is wrong with it, and what to write.
pub fn log_targets(text: &str) -> Result<Targets, String> {
    text.parse()
        .map_err(|e| format!("`{text}`: {e}; write a level, or levels by target such as info,godwit_node=debug"))
}

fn a_time<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    time(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

fn line_of(text: &str, at: &Range<usize>) -> usize {
    1 + text.as_bytes().iter().take(at.start).filter(|b| **b == b'\n').count()
}

/// serde's words in this program's.
fn plainly(message: &str) -> String {
    message.replace("unknown field", "there is no key").replace(", expected one of", ": the keys are")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    const CONTROLLER: &str = include_str!("../../../packaging/etc/controller.toml");
    const NODE: &str = include_str!("../../../packaging/etc/node.toml");

    /// The text with what is commented out as an example put in force: lines such as `#key = value`.
    fn in_force(text: &str) -> String {
        text.lines()
            .map(|l| l.strip_prefix('#').filter(|l| !l.starts_with(' ')).unwrap_or(l))
            .fold(String::new(), |all, line| all + line + "\n")
    }

    fn node_args(line: &str) -> NodeArgs {
        match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Command::Node(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_packages_files_are_good_as_they_are_and_name_each_key_with_its_default() {
        parse::<ControllerFile>(CONTROLLER).unwrap();
        parse::<NodeFile>(NODE).unwrap();
        let file: ControllerFile = parse(&in_force(CONTROLLER)).unwrap();
        let ControllerFile {
            listen: Some(listen),
            state: Some(_),
            credentials: Some(_),
            authority: Some(_),
            certificate_life: Some(life),
            log: Some(_),
            log_format: Some(LogFormat::Text),
        } = file
        else {
            panic!("a key is not in the file, or not with its default: {file:?}")
        };
        assert_eq!(life, CERTIFICATE_LIFE);
        assert_eq!(listen, "127.0.0.1:7400".parse().unwrap());
        let file: NodeFile = parse(&in_force(NODE)).unwrap();
        let NodeFile {
            name: Some(_),
            state: Some(_),
            run: Some(_),
            images: Some(_),
            pool: Some(_),
            address: Some(_),
            api: Some(7410),
            control: Some(7411),
            disk: Some(10809),
            memory: Some(4444),
            extender: Some(_),
            watch_every: Some(routine),
            credentials: Some(_),
            log: Some(_),
            log_format: Some(LogFormat::Text),
        } = file
        else {
            panic!("a key is not in the file, or not with its default: {file:?}")
        };
        assert_eq!(routine, Routine::default());
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_what_is_built_in() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.toml");
        let text = "state = \"/s\"\nrun = \"/r\"\nimages = \"/i\"\naddress = \"10.0.0.1\"\napi = 1\ncontrol = 2\n";
        std::fs::write(&path, text).unwrap();
        let line = format!("godwit node --config {} --api 7 --state /other", path.display());
        let settings = node(node_args(&line), Some("/said".into())).unwrap();
        assert_eq!((settings.api, settings.control, settings.disk), (7, 2, 10809));
        assert_eq!(settings.state, Path::new("/other"));
        assert_eq!(settings.run, Path::new("/r"));
        assert_eq!(settings.credentials.as_deref(), Some(Path::new("/said")));
    }

    #[test]
    fn what_neither_says_is_asked_for_with_both_ways_to_say_it() {
        let failure = node(node_args("godwit node --state /s --run /r --images /i"), None).unwrap_err();
        assert_eq!(
            failure.to_string(),
            "`address` is not set: say --address, or name a file that has it with --config"
        );
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file_its_line_and_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("controller.toml");
        for (text, line, words) in [
            ("# a\nlisten = \"127.0.0.1:1\"\nlisen = 1\n", 3, vec!["there is no key `lisen`", "`listen`, `state`"]),
            ("listen = \"localhost\"\n", 1, vec!["invalid socket address"]),
            ("\nlisten\n", 2, vec!["expected"]),
            ("\n\nstate = \"here\"\n", 3, vec!["`state` is `here`", "whole path"]),
            ("state = \"/s\"\nlog = \"info,x=loud\"\n", 2, vec!["`log` is `info,x=loud`", "write a level"]),
            ("state = \"/s\"\nstate = \"/t\"\n", 2, vec!["duplicate"]),
            ("state = \"/s\"\ncertificate_life = \"long\"\n", 2, vec!["`long` is no time"]),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = check(&path, None).unwrap_err().to_string();
            assert!(said.starts_with(&format!("{}, line {line}: ", path.display())), "{said}");
            assert!(said.ends_with("`godwit config check`"), "{said}");
            for word in words {
                assert!(said.contains(word), "{said}");
            }
        }
        let node = folder.path().join("node.toml");
        let said = check(&node, None).unwrap_err().to_string();
        assert!(said.contains("node.toml: cannot be read"), "{said}");
        // The daemon that reads it would not start.
        let mut text = String::new();
        for (key, value) in [("state", "/s"), ("run", "/r"), ("images", "/i"), ("address", "192.0.2.1")] {
            std::fs::write(&node, &text).unwrap();
            let said = check(&node, None).unwrap_err().to_string();
            assert!(said.starts_with(&format!("`{key}` is not set: add `{key} = ...` to /")), "{said}");
            text += &format!("{key} = \"{value}\"\n");
        }
        std::fs::write(&node, &text).unwrap();
        check(&node, None).unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(check(&path, None).unwrap_err().to_string().starts_with("`state` is not set"));
        let said = check(&folder.path().join("x.toml"), None).unwrap_err().to_string();
        assert!(said.contains("--for controller"), "{said}");
    }
}
