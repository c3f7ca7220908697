//! The command line.

use crate::quantity::{rate, rate_or_none, size, time};
use clap::{Args, Parser, Subcommand, ValueEnum};
use godwit_api::Name;
use godwit_api::host::DiskStrategy;
use godwit_api::wire::WireEnd;
use godwit_trust::Identity;
use godwit_units::{BitRate, Bytes, MaxDrain, Policy, RadosPool};
use serde::Deserialize;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Moves running virtual machines between data centres over a WAN: memory, disks and network.
#[derive(Debug, Parser)]
#[command(name = "godwit", version, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 blocked, 4 unreachable, 5 cancelled; 130 when ^C\nended the following of a move, which goes on."
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Where the controller's API listens
    #[arg(long, global = true, value_name = "HOST:PORT", env = "GODWIT_CONTROLLER", default_value = "127.0.0.1:7400")]
    pub controller: String,
    /// The controller's name, as in its certificate
    #[arg(long, global = true, value_name = "NAME", env = "GODWIT_CONTROLLER_NAME", default_value = "controller")]
    pub controller_name: Name,
    /// Folder with ca.pem, cert.pem and key.pem [default: ~/.config/godwit; a daemon's: `credentials` in its state folder, if it is there]
    #[arg(long, global = true, value_name = "DIR", env = "GODWIT_CREDENTIALS")]
    pub credentials: Option<PathBuf>,
    /// File with a token of `godwit token create`, to ask with instead of a certificate
    #[arg(long, global = true, value_name = "FILE", env = "GODWIT_API_TOKEN_FILE")]
    pub api_token_file: Option<PathBuf>,
    /// Print JSON, as the API has it
    #[arg(long, global = true)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an authority, and certificates
    #[command(subcommand)]
    Pki(Pki),
    /// Make a deployment: its authority, the controller's certificate, and a first admin's
    Init(InitArgs),
    /// Make this host a node of a deployment, with a token of `godwit host token`
    Enroll(EnrollArgs),
    /// Certificates' holders: hosts, people, programs
    #[command(subcommand)]
    Identity(IdentityCommand),
    /// Tokens with which people of a trust domain ask the API
    #[command(subcommand)]
    Token(TokenCommand),
    /// Run the controller
    Controller(ControllerArgs),
    /// Run the daemon of a host
    Node(NodeArgs),
    /// Sites: clouds, regions, data centres
    #[command(subcommand)]
    Site(Site),
    /// Hosts: machines with a node daemon
    #[command(subcommand)]
    Host(Host),
    /// Components: what VMs' network interfaces are wired to
    #[command(subcommand)]
    Component(Component),
    /// Virtual machines
    #[command(subcommand)]
    Vm(Vm),
    /// Volumes: VMs' disks
    #[command(subcommand)]
    Volume(crate::volume::VolumeCommand),
    /// Wires: what joins VMs' network interfaces and components' ports
    #[command(subcommand)]
    Wire(WireCommand),
    /// Extenders: encrypted tunnels between sites, which wires take by themselves
    #[command(subcommand)]
    Extender(crate::extender::ExtenderCommand),
    /// The virtual network as a whole
    #[command(subcommand)]
    Net(crate::net::NetCommand),
    /// What is nobody's on some host
    #[command(subcommand)]
    Orphan(OrphanCommand),
    /// Move a running VM, and follow the move
    Move(MoveArgs),
    /// Say beforehand what a move will take, or who of a site's VMs is away in time; of figures that are given (--memory, --log,
    /// --fleet), no controller is asked
    Predict(Box<crate::predict::PredictArgs>),
    /// Follow what happens: VMs, hosts, volumes, moves
    Events(EventsArgs),
    /// Recorded migration streams
    #[command(subcommand)]
    Stream(crate::stream::StreamCommand),
    /// The controller's API itself
    #[command(subcommand)]
    Api(Api),
    /// The daemons' configuration files
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a shell's completion script
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages
    Man {
        /// Folder to write them to
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct PrecacheArgs {
    /// The volume, by name
    pub volume: Name,
    /// A host, or a site: its first host that answers
    #[arg(long, value_name = "SITE")]
    pub to: Name,
    /// At most so much, such as 20M; without it, what nobody else uses
    #[arg(long, value_name = "RATE", value_parser = rate, conflicts_with = "stop")]
    pub limit: Option<BitRate>,
    /// No limit any more
    #[arg(long, conflicts_with_all = ["limit", "stop"])]
    pub no_limit: bool,
    /// How often an epoch of writes ends [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "stop")]
    pub interval: Option<Duration>,
    /// Keep the last complete epoch as a whole image, of one moment with those of the VM's other disks there
    #[arg(long, conflicts_with = "stop")]
    pub consistent: bool,
    /// Keep no image any more
    #[arg(long, conflicts_with_all = ["consistent", "stop"])]
    pub no_consistent: bool,
    /// Memory at the volume's host for what the guest overwrites of an epoch before it was sent; for an image [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["no_consistent", "stop"])]
    pub image_room: Option<Bytes>,
    /// When the VM has moved there, turn the pre-cache around instead of ending it
    #[arg(long, conflicts_with = "stop")]
    pub follow: bool,
    /// End it when the VM has moved there
    #[arg(long, conflicts_with_all = ["follow", "stop"])]
    pub no_follow: bool,
    /// End it; what is there stays, and makes a later move there cheaper
    #[arg(long)]
    pub stop: bool,
}

#[derive(Debug, Args)]
pub struct InitArgs {
    /// The controller's state folder: in it come `ca`, `credentials` and `admin`
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
    /// What the first admin is called
    #[arg(long, value_name = "NAME", default_value = "admin")]
    pub admin: Name,
    /// How long the two certificates last
    #[arg(long, value_name = "TIME", default_value = "90d", value_parser = time)]
    pub certificate_life: Duration,
}

#[derive(Debug, Args)]
pub struct EnrollArgs {
    /// File with the token; `-` reads it from standard input. Not the token itself: everybody on a host sees command lines
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
    /// The node's state folder: in it comes `credentials`
    #[arg(long, value_name = "DIR")]
    pub state: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a token and print it, this once; a secret
    Create {
        /// What it is called
        name: Name,
        /// The trust domain: its holder sees what is in it, and nothing else
        #[arg(long)]
        domain: Name,
        /// What its holder may do there
        #[arg(long, value_parser = ["viewer", "operator", "admin"])]
        role: String,
        /// How long it is good for
        #[arg(long, value_name = "TIME", default_value = "30d", value_parser = time)]
        ttl: Duration,
    },
    /// List tokens, without their secrets
    Ls,
    /// Remove a token: from now on it is good for nothing
    Rm {
        /// What it is called
        name: Name,
    },
}

#[derive(Debug, Subcommand)]
pub enum IdentityCommand {
    /// Make every certificate void that somebody was issued until now
    Revoke {
        /// Whose, such as admin/ann
        #[arg(value_name = "ROLE/NAME")]
        identity: Identity,
    },
    /// List whose certificates are void
    Revoked,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Look a file through: unknown keys, values that make no sense, what the daemon needs and it does not say
    Check {
        /// The file
        file: PathBuf,
        /// Whose it is [default: what its name begins with]
        #[arg(long = "for", value_name = "DAEMON")]
        kind: Option<FileKind>,
    },
}

/// Whose configuration a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FileKind {
    /// The controller's
    Controller,
    /// A node's
    Node,
}

#[derive(Debug, Subcommand)]
pub enum Pki {
    /// Make a new authority
    Init {
        /// Its folder; its key stays there
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
    /// Issue a certificate with its key
    Issue {
        /// The authority's folder
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// What its holder is
        #[arg(long)]
        role: RoleArg,
        /// What its holder is called
        #[arg(long)]
        name: Name,
        /// Folder for ca.pem, cert.pem and key.pem
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// How long it is good for
        #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// The controller
    Controller,
    /// The daemon of a host
    Node,
    /// A person or program that may do everything
    #[value(alias = "admin")]
    Client,
    /// A person or program that may read and move
    Operator,
}

#[derive(Debug, Default, Args)]
pub struct ControllerArgs {
    /// File with what is not said here, such as /etc/godwit/controller.toml
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where its API listens [default: 127.0.0.1:7400]
    #[arg(long, value_name = "ADDR")]
    pub listen: Option<SocketAddr>,
    /// Folder of its store
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// How it writes its log to standard error; GODWIT_LOG says what of it [default: text]
    #[arg(long, value_name = "FORMAT", env = "GODWIT_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Folder of the authority that it issues certificates with [default: `ca` in the state folder, if it is there]
    #[arg(long, value_name = "DIR")]
    pub authority: Option<PathBuf>,
    /// How long the certificates last that it issues; nodes renew theirs when a third is left [default: 90d]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub certificate_life: Option<Duration>,
}

#[derive(Debug, Default, Args)]
pub struct NodeArgs {
    /// File with what is not said here, such as /etc/godwit/node.toml
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The host's name [default: the one in its certificate]
    #[arg(long)]
    pub name: Option<Name>,
    /// Folder for what survives a reboot: records, replicas
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Folder for what does not: sockets, process ids
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// Folder of the boot files that guests may use
    #[arg(long, value_name = "DIR")]
    pub images: Option<PathBuf>,
    /// Keep volumes that are new here in a pool of a Ceph cluster, rather than in the state folder
    #[arg(long, value_name = "[USER@]POOL[/NAMESPACE]")]
    pub pool: Option<RadosPool>,
    /// The address that it listens on, and that tunnels end at
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// TCP port of its API [default: 7410]
    #[arg(long, value_name = "PORT")]
    pub api: Option<u16>,
    /// UDP port for hand-offs and orders [default: 7411]
    #[arg(long, value_name = "PORT")]
    pub control: Option<u16>,
    /// UDP port for disk blocks [default: 10809]
    #[arg(long, value_name = "PORT")]
    pub disk: Option<u16>,
    /// UDP port for memory [default: 4444]
    #[arg(long, value_name = "PORT")]
    pub memory: Option<u16>,
    /// Carry extenders, the tunnels to other sites: reached at this address on 16 UDP ports from this one on, or `outbound`
    #[arg(long, value_name = "IP:PORT|outbound")]
    pub extender: Option<crate::extender::ExtenderAt>,
    /// How often each guest's memory is watched for 10 s, for predictions: a time such as `1h`, or `never` [default: 1h]
    #[arg(long, value_name = "TIME|never")]
    pub watch_every: Option<crate::profile::Routine>,
    /// How it writes its log to standard error; GODWIT_LOG says what of it [default: text]
    #[arg(long, value_name = "FORMAT", env = "GODWIT_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Begin after the event of this number; 0: with the oldest that is kept
    #[arg(long, value_name = "ID")]
    pub after: Option<u64>,
    /// End with the newest that is there
    #[arg(long)]
    pub no_follow: bool,
}

/// How daemons write their logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// A JSON object a line
    Json,
}

#[derive(Debug, Subcommand)]
pub enum Api {
    /// Print its OpenAPI document, as this version has it
    Spec,
}

#[derive(Debug, Subcommand)]
pub enum Site {
    /// Make a site known
    Add {
        /// Its name
        name: Name,
    },
    /// List sites
    Ls,
    /// Forget a site
    Rm {
        /// Its name
        name: Name,
    },
}

#[derive(Debug, Subcommand)]
pub enum Host {
    /// Make a host known
    Add {
        /// Its name, as in its certificate
        name: Name,
        /// The site that it is in
        #[arg(long)]
        site: Name,
        /// Where its node's API listens
        #[arg(long, value_name = "IP:PORT")]
        api: SocketAddr,
    },
    /// List hosts
    Ls,
    /// Show a host
    Show {
        /// Its name
        name: Name,
    },
    /// Forget a host
    Rm {
        /// Its name
        name: Name,
    },
    /// Print a token, good for one use, that a host enrols with; a secret
    Token {
        /// The host's name
        name: Name,
        /// How long it is good for
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
        ttl: Duration,
    },
    /// Make a host's certificates void, here and on every node, and end its sessions
    Revoke {
        /// Its name
        name: Name,
    },
}

#[derive(Debug, Subcommand)]
pub enum Component {
    /// Make a component known
    #[command(group = clap::ArgGroup::new("kind").required(true))]
    Add {
        /// Its name
        name: Name,
        /// A bridge of this name on whichever host a VM is on
        #[arg(long, value_name = "BRIDGE", group = "kind")]
        switch: Option<String>,
        /// A bridge on one host, reached through tunnels that follow the VM
        #[arg(long, value_name = "HOST:BRIDGE", group = "kind", value_parser = gateway)]
        gateway: Option<(Name, String)>,
    },
    /// Make a switch, a router, a firewall or a gateway, which is wired up and moves like a VM
    Create(crate::component::CreateArgs),
    /// Show one that was made, with its file
    Show {
        /// Its name
        name: Name,
    },
    /// Give one that was made another file, wholly or not at all
    Apply {
        /// Its name
        name: Name,
        /// The file; `-` reads it from standard input
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Put a second switch beside one, at another site, for whatever of its wires ends there
    Split {
        /// The switch
        name: Name,
        /// The site
        #[arg(long, value_name = "SITE")]
        to: Name,
        /// What the second one is called [default: NAME-SITE]
        #[arg(long = "as", value_name = "NAME")]
        part: Option<Name>,
        /// The port of both that joins them [default: the last that is free on both]
        #[arg(long, value_name = "PORT")]
        trunk: Option<godwit_api::wire::PortName>,
    },
    /// Make one switch of several: the first one gets the others' wires, and they go
    Merge {
        /// The switch that stays
        into: Name,
        /// Those that go, in this order
        #[arg(required = true)]
        others: Vec<Name>,
    },
    /// Take one whose host is lost for good for another host; it begins there with nothing learnt
    Claim {
        /// Its name
        name: Name,
        /// The host or site that is to have it
        #[arg(long, value_name = "HOST|SITE")]
        at: Name,
        /// How the lost host is kept from running it, and who says so
        #[arg(long, value_name = "TEXT")]
        fenced: String,
    },
    /// Delete one that was made, with all that it has learnt
    Delete {
        /// Its name
        name: Name,
    },
    /// List components: first those that were made known, then those that were made
    Ls,
    /// Forget a component that was made known
    Rm {
        /// Its name
        name: Name,
    },
}

#[derive(Debug, Subcommand)]
pub enum WireCommand {
    /// Join two ports; the wire follows both wherever they move
    Connect {
        /// One end, such as web:eth0
        a: WireEnd,
        /// The other one
        b: WireEnd,
    },
    /// Take the wire between two ports away; both are isolated
    Disconnect {
        /// One end
        a: WireEnd,
        /// The other one
        b: WireEnd,
    },
    /// List wires
    Ls,
    /// Show a wire between two ports, as the hosts of its ends have it
    Show {
        /// Its number, or one of its ends
        wire: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum OrphanCommand {
    /// List them, with what speaks for and against removing each
    Ls,
    /// Remove one that may be removed
    Rm {
        /// The host that it is on
        host: Name,
        /// Its name, as `ls` shows it
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Vm {
    /// Create a VM
    Create(Box<CreateArgs>),
    /// List VMs
    Ls,
    /// Show a VM
    Show {
        /// Its name
        name: Name,
    },
    /// Start a VM
    Start {
        /// Its name
        name: Name,
    },
    /// Stop a VM: ask its guest to shut down
    Stop {
        /// Its name
        name: Name,
        /// Pull the plug instead
        #[arg(long)]
        force: bool,
    },
    /// Delete a VM, with its disks
    Rm {
        /// Its name
        name: Name,
    },
    /// Watch which pages of its memory change, without moving it: what predictions go by
    Profile(crate::profile::ProfileArgs),
    /// Send a QMP command to its QEMU
    Monitor {
        /// Its name
        name: Name,
        /// The host to ask, where the VM has more than one QEMU (during a move)
        #[arg(long, value_name = "HOST")]
        at: Option<Name>,
        /// The command, such as '{"execute": "query-status"}'
        command: String,
    },
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Its name
    pub name: Name,
    /// The host or site to create it on
    #[arg(long, value_name = "HOST|SITE")]
    pub at: Name,
    /// Its description in TOML or JSON; `-` reads it from standard input. The options below come on top
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Start it at once
    #[arg(long)]
    pub start: bool,
    /// RAM
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<Bytes>,
    /// CPUs at boot
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u32>,
    /// CPUs that can be plugged in later, those at boot included
    #[arg(long, value_name = "N")]
    pub max_vcpus: Option<u32>,
    /// CPU model, with features as +name
    #[arg(long)]
    pub cpu: Option<String>,
    /// Machine type
    #[arg(long)]
    pub machine: Option<String>,
    /// How it is executed
    #[arg(long, value_parser = ["kvm", "tcg"])]
    pub accel: Option<String>,
    /// Boot this kernel of the hosts' image folder, not the first disk
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<String>,
    /// The kernel's initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<String>,
    /// The kernel's command line
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub cmdline: Option<String>,
    /// A disk; may be repeated
    #[arg(long = "disk", value_name = "VOLUME=SIZE[,rados=POOL][,shared=DIR][,device=PATH[,overwrite][,zeroed]][,from=FILE]", value_parser = crate::spec::disk)]
    pub disks: Vec<godwit_api::vm::DiskSpec>,
    /// A network interface; may be repeated
    #[arg(long = "nic", value_name = "MAC[@COMPONENT][,name=PORT][,ip=IP][,mtu=N]", value_parser = crate::spec::nic)]
    pub nics: Vec<godwit_api::vm::NicSpec>,
    /// A further device, as QEMU's -device takes it; may be repeated
    #[arg(long = "device", value_name = "DRIVER[,PROPERTY=VALUE]")]
    pub devices: Vec<String>,
    /// While a block of a disk that follows the guest does not come, since its holder is cut off: all of the guest stands still, or what waits for the block
    #[arg(long, value_parser = ["pause", "wait"])]
    pub on_cut: Option<String>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct MoveArgs {
    #[command(subcommand)]
    pub command: Option<MoveCommand>,
    /// The VM, or a component that was made; several VMs go one after another, first the one that is foretold to be over soonest, and the
    /// next when the one before runs there
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<Name>,
    /// Where to: a site, or a host
    #[arg(long, value_name = "SITE|HOST", required_unless_present = "cancel")]
    pub to: Option<Name>,
    /// How the disks travel: `mirror`, before the VM; `postcopy`, after it, on demand and behind its back; `shared`, not at
    /// all, since they lie on storage that both hosts reach
    #[arg(long, value_name = "STRATEGY", default_value = "mirror", value_parser = strategy)]
    pub disk: DiskStrategy,
    /// At most so much on the link, such as 50M or 100Mbit/s
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub limit: Option<BitRate>,
    /// What the move is to spare: `least-downtime`; `least-total`, its time; `least-bytes`; `max-downtime=300ms`, or it is given up
    /// and the VM stays; `deadline=90s`: by then the guest is to run there, counted from this order, or from its turn where several VMs
    /// go, or as soon as possible where its memory cannot begin before that; blocks that follow it may take longer
    #[arg(long, value_name = "POLICY", default_value = "least-downtime")]
    pub policy: Policy,
    /// Slow the guest's CPUs by up to so many percent when it writes faster than the link carries; without, they are left alone. Not with
    /// `least-bytes`, which stops the guest before that shows
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=99))]
    pub throttle: Option<u8>,
    /// An experiment, which the controller has to allow: let a part of memory follow the guest where the rounds do not get shorter, if that
    /// is predicted to take no longer than TIME; if the source's host is lost meanwhile, so is the memory (`memory-lost`). Not with
    /// `least-bytes`
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "30s",
          conflicts_with = "keep_checkpoint")]
    pub memory_postcopy: Option<MaxDrain>,
    /// CPUs to have at the destination, if more than now
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u32>,
    /// Have the host that it leaves keep its memory for a day, sealed under a key that goes with the VM: coming back is less then
    #[arg(long)]
    pub keep_checkpoint: bool,
    /// Have a volume lie on a block device of the destination, which is the volume's alone from then on and is zeroed first. One with a file system or
    /// the like is refused without `overwrite`; `zeroed` vouches that it reads as zeroes. Again for another volume; for admins
    #[arg(long, value_name = "VOLUME,device=PATH[,overwrite][,zeroed]", value_parser = crate::spec::place)]
    pub place: Vec<godwit_api::vm::Placement>,
    /// Only check, and list what is in the way
    #[arg(long)]
    pub dry_run: bool,
    /// Do not follow the move
    #[arg(long)]
    pub detach: bool,
    /// Take the VM's move back; it goes on at its source
    #[arg(long, conflicts_with_all = ["to", "limit", "policy", "throttle", "memory_postcopy", "vcpus", "place", "dry_run", "detach"])]
    pub cancel: bool,
}

#[derive(Debug, Subcommand)]
pub enum MoveCommand {
    /// List moves, the newest first
    Ls,
    /// Show a move
    Show {
        /// The move's number, or a VM: its newest move
        which: String,
    },
    /// Order a move again that has failed or was cancelled
    Retry {
        /// The move's number
        id: u64,
        /// Do not follow it
        #[arg(long)]
        detach: bool,
    },
    /// Take the VM of a move that waits for a host that is lost for good
    Resolve {
        /// The move's number
        id: u64,
        /// The host or site that is to have the VM: the move's source or its destination
        #[arg(long, value_name = "HOST|SITE")]
        claim: Name,
        /// How the other host is kept from running the VM, and who says so
        #[arg(long, value_name = "TEXT")]
        fenced: String,
        /// Somebody knows that the VM did not run on the other host since it stopped
        #[arg(long)]
        peer_did_not_run: bool,
    },
    /// Change the limit of a VM's move
    Limit {
        /// The VM
        vm: Name,
        /// The rate, such as 50M, or `none`
        #[arg(value_parser = rate_or_none)]
        rate: Limit,
    },
}

/// None lifts the limit. (An alias, since clap would take `Option` for an argument that may be missing.)
pub type Limit = Option<BitRate>;

fn gateway(text: &str) -> Result<(Name, String), String> {
    let (host, bridge) =
        text.split_once(':').ok_or_else(|| format!("`{text}`: write HOST:BRIDGE, such as edge:br0"))?;
    Ok((host.parse().map_err(|e: godwit_api::name::NotAName| e.to_string())?, bridge.to_owned()))
}

fn strategy(text: &str) -> Result<DiskStrategy, String> {
    match text {
        "mirror" => Ok(DiskStrategy::Mirror),
        "postcopy" => Ok(DiskStrategy::Postcopy),
        "shared" => Ok(DiskStrategy::Shared),
        _ => Err("the strategies are: mirror, postcopy, shared".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_move_is_ordered_cancelled_listed_and_limited() {
        let Command::Move(order) = parse("godwit move web --to texas --limit 50M --json").unwrap().command else {
            panic!("no move")
        };
        assert_eq!(order.vms[0].as_str(), "web");
        assert_eq!(order.to.unwrap().as_str(), "texas");
        assert_eq!(order.limit, Some(BitRate(50_000_000)));
        let Command::Move(order) = parse("godwit move web --cancel").unwrap().command else { panic!("no move") };
        assert!(order.cancel);
        for (line, rate) in
            [("godwit move limit web none", None), ("godwit move limit web 1M", Some(BitRate(1_000_000)))]
        {
            let Command::Move(order) = parse(line).unwrap().command else { panic!("no move") };
            assert!(matches!(order.command, Some(MoveCommand::Limit { rate: r, .. }) if r == rate), "{line}");
        }
        assert!(matches!(
            parse("godwit move ls").unwrap().command,
            Command::Move(MoveArgs { command: Some(MoveCommand::Ls), .. })
        ));
        parse("godwit move resolve 3 --claim texas --fenced cut").unwrap();
        parse("godwit move retry 3 --detach").unwrap();
        for line in [
            "godwit move",
            "godwit move resolve 3 --claim texas",
            "godwit move resolve 3 --fenced cut",
            "godwit move web",
            "godwit move web --cancel --to texas",
            "godwit move web --to texas --disk x",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_component_is_a_switch_or_a_gateway() {
        parse("godwit component add lan --switch br0").unwrap();
        parse("godwit component add out --gateway edge:br0").unwrap();
        for line in ["lan", "lan --gateway edge", "lan --switch a --gateway edge:b"] {
            assert!(parse(&format!("godwit component add {line}")).is_err(), "{line}");
        }
    }
}
