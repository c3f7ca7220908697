//! Trust domains: who asks with a token of one sees what is in it, and nothing else is there.

use crate::fakes::{World, name, to_host, web};
use godwit_api::host::{SetLimit, StopVm};
use godwit_api::trust::{NewApiToken, TokenRole};
use godwit_api::vm::Store;
use godwit_api::{ApiError, Problem, PublicClient};
use godwit_trust::{Access, AccessToken, Identity, Role};
use godwit_units::MoveId;
use std::fmt::Debug;
use std::time::Duration;

async fn with_token(world: &World, called: &str, domain: &str, role: TokenRole, ttl_s: u64) -> PublicClient {
    let new = NewApiToken { name: name(called), domain: name(domain), role, ttl_s };
    let token: AccessToken = world.api.create_token(&new).await.unwrap().token.parse().unwrap();
    let controller = Identity::new(Role::Controller, "controller").unwrap();
    PublicClient::with_token(world.controller_address(), controller, &token)
}

fn refused<T: Debug>(answer: Result<T, ApiError>, problem: Problem) -> String {
    let error = answer.unwrap_err();
    assert_eq!(error.problem, problem, "{error}");
    error.message
}

#[tokio::test]
async fn anothers_objects_are_not_there_in_the_words_for_what_never_was() {
    let world = World::new().await;
    let ann = with_token(&world, "ann", "acme", TokenRole::Admin, 3600).await;
    let bob = with_token(&world, "bob", "beta", TokenRole::Admin, 3600).await;
    ann.create_vm(&web("ohio")).await.unwrap();
    let mv = ann.start_move(&to_host("texas")).await.unwrap();
    for (who, api, seen) in [("ann", &ann, 1), ("bob", &bob, 0), ("the deployment", &world.api, 1)] {
        assert_eq!(api.vms().await.unwrap().len(), seen, "{who}");
        assert_eq!(api.volumes().await.unwrap().len(), seen, "{who}");
        assert_eq!(api.wires().await.unwrap().len(), 2 * seen, "{who}");
        assert_eq!(api.moves().await.unwrap().len(), seen, "{who}");
        assert_eq!(api.vm(&name("web")).await.is_ok(), seen == 1, "{who}");
        assert_eq!(api.mv(mv.id).await.is_ok(), seen == 1, "{who}");
    }
    let (web, none) = (name("web"), name("none"));
    let same = |a: String, b: String| assert_eq!(a.replace("web", "none").replace("`1`", "`99`"), b);
    let not_there = |answer| refused(answer, Problem::NotFound);
    same(refused(bob.vm(&web).await, Problem::NotFound), refused(bob.vm(&none).await, Problem::NotFound));
    same(not_there(bob.start(&web).await), not_there(bob.start(&none).await));
    same(
        not_there(bob.stop(&web, StopVm { force: true }).await),
        not_there(bob.stop(&none, StopVm { force: true }).await),
    );
    same(not_there(bob.remove_vm(&web).await), not_there(bob.remove_vm(&none).await));
    let mut elsewhere = to_host("texas");
    let mine = bob.start_move(&elsewhere).await;
    elsewhere.vm = none;
    same(refused(mine, Problem::NotFound), refused(bob.start_move(&elsewhere).await, Problem::NotFound));
    let never = MoveId(99);
    let limit = SetLimit { limit: None };
    same(refused(bob.mv(mv.id).await, Problem::NotFound), refused(bob.mv(never).await, Problem::NotFound));
    same(refused(bob.cancel(mv.id).await, Problem::NotFound), refused(bob.cancel(never).await, Problem::NotFound));
    same(
        refused(bob.limit(mv.id, limit).await, Problem::NotFound),
        refused(bob.limit(never, limit).await, Problem::NotFound),
    );
    // However it is spelt: handlers see what is decoded.
    let raw = bob.client();
    for path in ["/v1/vms/w%65b", "/v1/moves/%31"] {
        refused(raw.get::<serde_json::Value>(path).await, Problem::NotFound);
    }
    refused(raw.delete::<serde_json::Value>("/v1/vms/w%65b").await, Problem::NotFound);
    for path in ["/v1/vms/%77eb/start", "/v1/vms/we%62/stop", "/v1/moves/%31/cancel"] {
        let answer = raw.post::<serde_json::Value>(path, &StopVm { force: true }).await;
        refused(answer, Problem::NotFound);
    }
    assert_eq!(world.api.vms().await.unwrap().len(), 1);
    assert!(!world.fakes["ohio"].with(|n| n.heard.iter().any(|h| h.contains("cancel"))));
}

#[tokio::test]
async fn a_token_gives_its_role_in_its_domain_until_it_ends_or_is_removed() {
    let world = World::new().await;
    let admin = with_token(&world, "admin", "acme", TokenRole::Admin, 3600).await;
    let operator = with_token(&world, "operator", "acme", TokenRole::Operator, 3600).await;
    let viewer = with_token(&world, "viewer", "acme", TokenRole::Viewer, 3600).await;
    let mut from_a_file = web("ohio");
    from_a_file.spec.disks[0].from = Some("/etc/shadow".into());
    refused(admin.create_vm(&from_a_file).await, Problem::Forbidden);
    let mut on_a_device = web("ohio");
    let store = Store::Device { path: "/dev/sda".into(), overwrite: true, zeroed: false };
    on_a_device.spec.disks[0].store = Some(store);
    refused(admin.create_vm(&on_a_device).await, Problem::Forbidden);
    let mut with_a_device = web("ohio");
    with_a_device.spec.devices = vec!["pvpanic".into()];
    refused(admin.create_vm(&with_a_device).await, Problem::Forbidden);
    for below in [&operator, &viewer] {
        refused(below.create_vm(&web("ohio")).await, Problem::Forbidden);
    }
    admin.create_vm(&web("ohio")).await.unwrap();
    refused(viewer.start_move(&to_host("texas")).await, Problem::Forbidden);
    let mut onto_a_device = to_host("texas");
    onto_a_device.place =
        vec![serde_json::from_value(serde_json::json!({"volume": "root", "device": "/dev/sdb"})).unwrap()];
    let holder = Identity::new(Role::Controller, "controller").unwrap();
    let of_the_deployment = world.credentials(Role::Client(Access::Operator), "bob");
    let of_the_deployment = PublicClient::new(world.controller_address(), holder, &of_the_deployment);
    for below in [&admin, &operator, &of_the_deployment] {
        let why = refused(below.start_move(&onto_a_device).await, Problem::Forbidden);
        assert!(why.ends_with("may not name devices of a host"), "{why}");
        // Nor may they ask what is on such a device.
        refused(below.dry_run(&onto_a_device).await, Problem::Forbidden);
    }
    world.api.dry_run(&onto_a_device).await.unwrap();
    operator.start_move(&to_host("texas")).await.unwrap();
    refused(admin.hosts().await, Problem::Forbidden);
    refused(
        admin.monitor(&name("web"), None, &serde_json::json!({"execute": "query-status"})).await,
        Problem::Forbidden,
    );
    refused(admin.tokens().await, Problem::Forbidden);
    assert_eq!(admin.sites().await.unwrap().len(), world.api.sites().await.unwrap().len());

    let brief = with_token(&world, "brief", "acme", TokenRole::Viewer, 1).await;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert!(refused(brief.vms().await, Problem::Forbidden).contains("expired"));
    world.api.remove_token(&name("viewer")).await.unwrap();
    assert!(refused(viewer.vms().await, Problem::Forbidden).contains("no such token"));
    let left: Vec<_> = world.api.tokens().await.unwrap().into_iter().map(|t| t.name.to_string()).collect();
    assert_eq!(left, ["admin", "brief", "operator"]);
}

/// What somebody is told of all that is kept: kinds, with the names of VMs and volumes.
async fn told(api: &PublicClient) -> Vec<String> {
    let mut stream = api.events(Some(0), false).await.unwrap();
    let mut all = vec![];
    while let Some(event) = stream.next().await.unwrap() {
        let value = serde_json::to_value(&event).unwrap();
        let kind = event.what.kind();
        let about = if kind.starts_with("host-") { &["host"][..] } else { &["vm", "volume"] };
        let names = about.iter().filter_map(|member| value[member].as_str());
        all.push([kind.as_str()].into_iter().chain(names).collect::<Vec<_>>().join(" "));
    }
    all
}

#[tokio::test]
async fn each_domain_follows_its_own_events_for_as_long_as_its_token_is_good() {
    let world = World::new().await;
    let ann = with_token(&world, "ann", "acme", TokenRole::Admin, 3600).await;
    let bob = with_token(&world, "bob", "beta", TokenRole::Viewer, 3600).await;
    let carl = with_token(&world, "carl", "beta", TokenRole::Admin, 3600).await;
    ann.create_vm(&web("ohio")).await.unwrap();
    let mut other = web("ohio");
    (other.name, other.spec.disks[0].volume) = (name("shop"), name("stock"));
    for (n, nic) in other.spec.nics.iter_mut().enumerate() {
        nic.mac = format!("02:00:00:00:01:0{n}");
    }
    carl.create_vm(&other).await.unwrap();
    let mv = ann.start_move(&to_host("texas")).await.unwrap();
    ann.cancel(mv.id).await.unwrap();
    world.until(mv.id, |m| !m.progress.outcome.is_open()).await;
    let mut following = bob.events(None, true).await.unwrap();
    world.fakes["ohio"].with(|n| n.vms.values_mut().for_each(|vm| vm.run = godwit_api::host::RunState::Off));
    carl.remove_vm(&name("shop")).await.unwrap();

    let (of_ann, of_bob, all) = (told(&ann).await, told(&bob).await, told(&world.api).await);
    for (whose, mine, theirs) in
        [(&of_ann, ["web", "root"], ["shop", "stock"]), (&of_bob, ["shop", "stock"], ["web", "root"])]
    {
        assert!(mine.iter().all(|m| whose.iter().any(|e| e.contains(m))), "{whose:?}");
        assert!(!whose.iter().any(|e| theirs.iter().any(|t| e.contains(t))), "{whose:?}");
        assert!(!whose.iter().any(|e| e.starts_with("host-")), "hosts are the deployment's: {whose:?}");
    }
    for wanted in ["move-ordered web", "move-cancelled web", "move-ended web"] {
        assert!(of_ann.iter().any(|e| e == wanted), "{wanted}: {of_ann:?}");
    }
    for wanted in ["vm-removed shop", "volume-removed stock"] {
        assert!(of_bob.iter().any(|e| e == wanted), "told when it is gone: {wanted}: {of_bob:?}");
    }
    assert!(all.iter().any(|e| e == "host-added ohio") && all.iter().any(|e| e == "vm-removed shop"), "{all:?}");
    // Nothing is left out that is not a host's.
    assert_eq!(all.iter().filter(|e| !e.starts_with("host-")).count(), {
        let shared = of_ann.iter().filter(|e| of_bob.contains(e) && !e.contains("web")).count();
        of_ann.len() + of_bob.len() - shared
    });

    // Who follows sees what happens, until their token is no more.
    let first = tokio::time::timeout(Duration::from_secs(5), following.next()).await.unwrap().unwrap().unwrap();
    assert!(["volume-removed", "vm-removed"].contains(&first.what.kind().as_str()), "{first:?}");
    world.api.remove_token(&name("bob")).await.unwrap();
    world.api.add_site(&godwit_api::public::Site { name: name("south") }).await.unwrap();
    let end = async {
        while let Ok(Some(event)) = following.next().await {
            assert_ne!(event.what.kind(), "site-added", "told after the token was removed");
        }
    };
    tokio::time::timeout(Duration::from_secs(15), end).await.expect("the stream ends");
}
