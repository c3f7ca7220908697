//! The commands that ask the controller.

use crate::args::PrecacheArgs;
use crate::args::{
    Command, Component, Global, Host, IdentityCommand, MoveArgs, MoveCommand, OrphanCommand, Site, TokenCommand, Vm,
};
use crate::failure::{Code, Failure};
use crate::follow::{follow, print_text, write_json};
use crate::volume::VolumeCommand;
use crate::{component, events, show, spec, timeline};
use godwit_api::host::{SetLimit, StopVm};
use godwit_api::image::Direction;
use godwit_api::precache::StartPrecache;
use godwit_api::progress::Outcome;
use godwit_api::public::{self, AddHost, CreateVm, Move, StartMove};
use godwit_api::trust::NewApiToken;
use godwit_api::vm::ComponentSpec;
use godwit_api::{ApiError, Name, Problem, PublicClient};
use godwit_trust::{Credentials, Identity, Role};
use serde::Serialize;
use std::path::PathBuf;

/// The folder of the credentials to use.
///
/// # Errors
/// None is named, and there is no home.
pub fn credentials(global: &Global) -> Result<PathBuf, Failure> {
    global.credentials.clone().map_or_else(own_credentials, Ok)
}

/// The folder of the user's credentials, where none is named.
///
/// # Errors
/// There is no home.
pub fn own_credentials() -> Result<PathBuf, Failure> {
    let home = std::env::var_os("HOME");
    home.map(|home| PathBuf::from(home).join(".config/godwit"))
        .ok_or_else(|| Failure::usage("no credentials: name their folder with --credentials or GODWIT_CREDENTIALS"))
}

/// Carries out a command.
///
/// # Errors
/// The controller's, or that it cannot be reached.
pub fn run(global: &Global, command: Command) -> Result<(), Failure> {
    let controller =
        Identity::new(Role::Controller, global.controller_name.as_str()).map_err(|e| Failure::usage(e.to_string()))?;
    let client = match &global.api_token_file {
        Some(file) => PublicClient::with_token(&global.controller, controller, &crate::enrol::read_token(file)?),
        None => PublicClient::new(&global.controller, controller, &Credentials::load(&credentials(global)?)?),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let user = User { client, json: global.json };
    runtime.block_on(user.carry_out(command))
}

/// Who asks, and how they want the answer.
pub struct User {
    client: PublicClient,
    json: bool,
}

impl User {
    /// The controller.
    pub const fn api(&self) -> &PublicClient {
        &self.client
    }

    async fn carry_out(&self, command: Command) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            Command::Site(command) => self.site(command).await,
            Command::Host(command) => self.host(command).await,
            Command::Component(command) => self.component(command).await,
            Command::Vm(command) => self.vm(command).await,
            Command::Volume(VolumeCommand::Ls) => self.print(&api.volumes().await?, |v| show::volumes(v)),
            Command::Volume(VolumeCommand::Precache(args)) => self.precache(args).await,
            Command::Volume(VolumeCommand::Promote(args)) => {
                self.print(&crate::promote::run(api, &args).await?, crate::promote::show)
            }
            Command::Volume(VolumeCommand::Verify(args)) => {
                let found = crate::verify::run(api, &args).await?;
                self.print(&found, |found| crate::verify::show(&args.volume, found))?;
                crate::verify::verdict(&found)
            }
            Command::Volume(VolumeCommand::Import(args)) => {
                self.copy_image(crate::image::wanted(Direction::Import, &args.node, args.image, args.format)?).await
            }
            Command::Volume(VolumeCommand::Export(mut args)) => {
                if args.files.len() > 1 {
                    return Err(Failure::usage("with --volume only the image is named"));
                }
                let image = args.files.pop();
                self.copy_image(crate::image::wanted(Direction::Export, &args.node, image, Some(args.format))?).await
            }
            Command::Volume(VolumeCommand::Status { volume }) => {
                let mut all = api.precaches().await?;
                if let Some(name) = &volume {
                    all.retain(|p| &p.volume == name);
                    if all.is_empty() && !api.volumes().await?.iter().any(|known| &known.name == name) {
                        let unknown = ApiError::new(Problem::NotFound, format!("there is no volume `{name}`"));
                        return Err(unknown.remedy("`godwit volume ls` lists them").into());
                    }
                }
                self.print(&all, |all| show::precaches(all))
            }
            Command::Wire(command) => crate::wire::run(self, command).await,
            Command::Extender(command) => crate::extender::run(self, command).await,
            Command::Net(command) => crate::net::run(self, command).await,
            Command::Events(args) => events::follow(api, &args, self.json).await,
            Command::Move(MoveArgs { command: Some(command), .. }) => self.about_moves(command).await,
            Command::Orphan(OrphanCommand::Ls) => {
                self.print(&self.client.orphans().await?, |found| show::orphans(found))
            }
            Command::Orphan(OrphanCommand::Rm { host, id }) => Ok(self.client.remove_orphan(&host, &id).await?),
            Command::Predict(args) => crate::foretell::run(api, &args, self.json).await,
            Command::Move(order) => self.mv(order).await,
            Command::Identity(IdentityCommand::Revoke { identity }) => self
                .print(&api.revoke(&identity).await?, |_| {
                    format!("every certificate of {identity} until now is void\n")
                }),
            Command::Token(TokenCommand::Create { name, domain, role, ttl }) => {
                let role = serde_json::from_value(role.into()).map_err(|e| Failure::usage(e.to_string()))?;
                let new = NewApiToken { name, domain, role, ttl_s: ttl.as_secs() };
                self.print(&api.create_token(&new).await?, |token| format!("{}\n", token.token))
            }
            Command::Token(TokenCommand::Ls) => self.print(&api.tokens().await?, |tokens| {
                tokens.iter().map(|t| format!("{} {} {}\n", t.name, t.domain, t.role)).collect()
            }),
            Command::Token(TokenCommand::Rm { name }) => Ok(api.remove_token(&name).await?),
            Command::Identity(IdentityCommand::Revoked) => self
                .print(&api.revocations().await?, |list| list.holders.keys().map(|who| format!("{who}\n")).collect()),
            Command::Volume(_)
            | Command::Pki(_)
            | Command::Init(_)
            | Command::Enroll(_)
            | Command::Controller(_)
            | Command::Node(_)
            | Command::Api(_)
            | Command::Config(_)
            | Command::Stream(_)
            | Command::Completion { .. }
            | Command::Man { .. } => unreachable!("these ask no controller"),
        }
    }

    async fn copy_image(&self, wanted: Option<crate::image::Wanted>) -> Result<(), Failure> {
        let wanted = wanted.ok_or_else(|| Failure::usage("which volume? name it with --volume"))?;
        let copy = crate::image::run(&self.client, &wanted).await?;
        self.print(&copy, |copy| crate::image::show(&wanted, copy))?;
        crate::image::verdict(&wanted, &copy)
    }

    async fn precache(&self, args: PrecacheArgs) -> Result<(), Failure> {
        let PrecacheArgs { volume, to, limit, no_limit: unlimited, interval, image_room, stop, .. } = args;
        if stop {
            return Ok(self.client.stop_precache(&volume, &to).await?);
        }
        let interval_ms = interval.map(|interval| u64::try_from(interval.as_millis()).unwrap_or(u64::MAX));
        let either = |yes: bool, no: bool| (yes || no).then_some(yes);
        let consistent = either(args.consistent, args.no_consistent);
        let follow = either(args.follow, args.no_follow);
        let wanted = StartPrecache { volume, to, limit, unlimited, interval_ms, consistent, image_room, follow };
        let precache = self.client.start_precache(&wanted).await?;
        self.print(&precache, |p| show::precaches(std::slice::from_ref(p)))?;
        // The pre-cache has begun, whether or not its VM's disks can be counted.
        if precache.consistent
            && !self.json
            && let Ok(volumes) = self.client.volumes().await
            && let Some(note) = show::moments(&precache, &volumes)
        {
            eprintln!("{note}");
        }
        Ok(())
    }

    /// Prints an answer as JSON, or for people.
    pub fn print<T: Serialize>(&self, value: &T, text: impl Fn(&T) -> String) -> Result<(), Failure> {
        if self.json {
            return write_json(value);
        }
        print_text(&text(value))
    }

    async fn site(&self, command: Site) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            Site::Add { name } => self.print(&api.add_site(&public::Site { name }).await?, |_| String::new()),
            Site::Ls => self.print(&api.sites().await?, |s| show::sites(s)),
            Site::Rm { name } => Ok(api.remove_site(&name).await?),
        }
    }

    async fn host(&self, command: Host) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            Host::Add { name, site, api: address } => {
                let host = api.add_host(&AddHost { name, site, api: address }).await?;
                if let Some(error) = &host.error {
                    eprintln!("godwit: `{}` is known now, but does not answer: {error}", host.name);
                }
                self.print(&host, |_| String::new())
            }
            Host::Ls => self.print(&api.hosts().await?, |h| show::hosts(h)),
            Host::Show { name } => self.print(&api.host(&name).await?, show::host),
            Host::Rm { name } => Ok(api.remove_host(&name).await?),
            Host::Token { name, ttl } => {
                self.print(&api.host_token(&name, ttl).await?, |token| format!("{}\n", token.token))
            }
            Host::Revoke { name } => self.print(&api.revoke_host(&name).await?, |_| {
                format!("every certificate of `{name}` until now is void, and nodes that run are told; `godwit host token {name}` lets it enrol again\n")
            }),
        }
    }

    async fn component(&self, command: Component) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            Component::Add { name, switch, gateway } => {
                let kind = match (switch, gateway) {
                    (Some(bridge), None) => ComponentSpec::Switch { bridge },
                    (None, Some((host, bridge))) => ComponentSpec::Gateway { host, bridge, underlay: None },
                    _ => return Err(Failure::usage("name either --switch BRIDGE or --gateway HOST:BRIDGE")),
                };
                self.print(&api.add_component(&public::Component { name, kind }).await?, |_| String::new())
            }
            Component::Ls => {
                let (known, made) = (api.components().await?, api.component_objects().await?);
                if self.json {
                    return write_json(&component::both(&known, &made));
                }
                let made = if made.is_empty() { String::new() } else { component::list(&made) };
                let known = if known.is_empty() && !made.is_empty() { String::new() } else { show::components(&known) };
                print_text(&(known + &made))
            }
            Component::Create(args) => self.print(&component::create(api, args).await?, |_| String::new()),
            Component::Show { name } => self.print(&api.component_object(&name).await?, component::show),
            Component::Apply { name, config } => {
                self.print(&component::apply(api, &name, &config).await?, |_| String::new())
            }
            Component::Split { name, to, part, trunk } => {
                let said = crate::rewire::run_split(api, &name, &to, part, trunk.as_ref()).await?;
                self.print(&said, Clone::clone)
            }
            Component::Merge { into, others } => {
                self.print(&crate::rewire::run_merge(api, &into, &others).await?, Clone::clone)
            }
            Component::Claim { name, at, fenced } => {
                let claim = godwit_api::component::ClaimComponent { at, fenced };
                self.print(&api.claim_component(&name, &claim).await?, component::claimed)
            }
            Component::Delete { name } => Ok(api.delete_component(&name).await?),
            Component::Rm { name } => Ok(api.remove_component(&name).await?),
        }
    }

    async fn vm(&self, command: Vm) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            Vm::Create(args) => {
                let spec = spec::from_args(&args)?;
                let new = CreateVm { name: args.name, at: args.at, spec, start: args.start };
                self.print(&api.create_vm(&new).await?, |_| String::new())
            }
            Vm::Ls => self.print(&api.vms().await?, |v| show::vms(v)),
            Vm::Show { name } => self.print(&api.vm(&name).await?, show::vm),
            Vm::Start { name } => Ok(api.start(&name).await?),
            Vm::Stop { name, force } => Ok(api.stop(&name, StopVm { force }).await?),
            Vm::Rm { name } => Ok(api.remove_vm(&name).await?),
            Vm::Profile(args) => crate::profile::run(api, &args, self.json).await,
            Vm::Monitor { name, at, command } => {
                let command = serde_json::from_str(&command).map_err(|e| {
                    Failure::usage(format!("the command is no JSON: {e}; write '{{\"execute\": \"query-status\"}}'"))
                })?;
                write_json(&api.monitor(&name, at.as_ref(), &command).await?)
            }
        }
    }

    /// The newest move of a VM.
    async fn newest(&self, vm: &Name) -> Result<Move, Failure> {
        self.client
            .newest_move(vm)
            .await?
            .ok_or_else(|| Failure::new(Code::Failed, format!("`{vm}` was never moved; `godwit move ls` lists moves")))
    }

    async fn about_moves(&self, command: MoveCommand) -> Result<(), Failure> {
        let api = &self.client;
        match command {
            MoveCommand::Ls => self.print(&api.moves().await?, |m| show::moves(m)),
            MoveCommand::Show { which } => {
                let mv = match which.parse() {
                    Ok(id) => api.mv(godwit_units::MoveId(id)).await?,
                    Err(_) => {
                        let vm: Name =
                            which.parse().map_err(|e| Failure::usage(format!("{e}, nor a move's number")))?;
                        self.newest(&vm).await?
                    }
                };
                self.print(&mv, |mv| show::summary(mv) + &timeline::timeline(mv))
            }
            MoveCommand::Retry { id, detach } => {
                let mv = api.retry(godwit_units::MoveId(id)).await?;
                if detach {
                    return self.print(&mv, |mv| format!("move {} of `{}` has begun\n", mv.id.0, mv.vm));
                }
                follow(api, mv, self.json).await
            }
            MoveCommand::Resolve { id, claim, fenced, peer_did_not_run } => {
                let how = public::ResolveMove { claim, fenced, peer_did_not_run };
                let mv = api.resolve(godwit_units::MoveId(id), &how).await?;
                self.print(&mv, |mv| {
                    format!(
                        "`{}` is claimed for `{}`; `godwit vm show {}` tells when it runs\n",
                        mv.vm, how.claim, mv.vm
                    )
                })
            }
            MoveCommand::Limit { vm, rate } => {
                let mv = self.newest(&vm).await?;
                self.print(&api.limit(mv.id, SetLimit { limit: rate }).await?, |_| String::new())
            }
        }
    }

    async fn mv(&self, args: MoveArgs) -> Result<(), Failure> {
        let api = &self.client;
        if args.memory_postcopy.is_some() && !self.json {
            eprintln!("{}", crate::foretell::NOT_OF_POSTCOPY);
        }
        if args.vms.len() > 1 && !args.cancel {
            return crate::together::run(api, args, self.json).await;
        }
        let vm = args.vms.first().cloned().ok_or_else(|| Failure::usage("which VM?"))?;
        if args.vms.len() > 1 {
            return Err(Failure::usage("one move is taken back at a time: name one VM"));
        }
        if args.cancel {
            let mv = api.cancel(self.newest(&vm).await?.id).await?;
            return self.print(&mv, |mv| match mv.progress.outcome {
                Outcome::Cancelled => format!("move {} of `{vm}` is cancelled\n", mv.id.0),
                _ => format!(
                    "move {} of `{vm}` is being cancelled; `godwit move show {}` tells how it ends\n",
                    mv.id.0, mv.id.0
                ),
            });
        }
        let to = args.to.clone().ok_or_else(|| Failure::usage("where to? name a site or a host with --to"))?;
        if component::find(api, &vm).await?.is_some() {
            component::refuse_of_vms(&vm, &args)?;
            return self.print(&component::move_to(api, &vm, to, args.detach).await?, component::moved);
        }
        let MoveArgs { disk, limit, policy, throttle, memory_postcopy, vcpus, keep_checkpoint, place, dry_run, .. } =
            args;
        let order = StartMove {
            vm,
            to,
            disk,
            limit,
            policy,
            throttle,
            memory_postcopy,
            vcpus,
            keep_checkpoint,
            place,
            dry_run,
        };
        if args.dry_run {
            let dry = api.dry_run(&order).await?;
            self.print(&dry, show::dry_run)?;
            return if dry.blockers.is_empty() { Ok(()) } else { Err(Failure::new(Code::Blocked, "")) };
        }
        let mv = api.start_move(&order).await?;
        if let (Some(line), false) = (crate::foretell::line(&mv), self.json) {
            eprintln!("{line}");
        }
        if args.detach {
            return self
                .print(&mv, |mv| format!("move {} of `{}` from {} to {} has begun\n", mv.id.0, mv.vm, mv.from, mv.to));
        }
        follow(api, mv, self.json).await
    }
}
