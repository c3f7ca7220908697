//! The binary itself: against a real controller, and against a fake one that says what the test has it say.

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::public::{DryRun, Move, StartMove};
use godwit_api::{ApiError, Problem, serve};
use godwit_trust::Credentials;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path as FilePath, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// A folder with an authority and credentials, made by the binary.
struct Place {
    folder: TempDir,
}

fn godwit() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    for name in ["GODWIT_CONTROLLER", "GODWIT_CONTROLLER_NAME", "GODWIT_CREDENTIALS", "GODWIT_LOG"] {
        command.env_remove(name);
    }
    command
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        let (code, said, _) = run(godwit().args(["pki", "init", "--dir"]).arg(place.path("ca")));
        assert_eq!(code, 0, "{said}");
        for (role, name) in [("controller", "controller"), ("client", "ann")] {
            let mut issue = godwit();
            issue.args(["pki", "issue", "--role", role, "--name", name]);
            let (code, _, error) = run(issue.arg("--ca").arg(place.path("ca")).arg("--out").arg(place.path(name)));
            assert_eq!(code, 0, "{error}");
        }
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The binary as `ann`, for the controller at `address`.
    fn ann(&self, address: SocketAddr, words: &str) -> Command {
        let mut command = godwit();
        command.arg("--controller").arg(address.to_string()).arg("--credentials").arg(self.path("ann"));
        command.args(words.split(' '));
        command
    }
}

/// A process that is ended with its owner.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn start_controller(place: &Place, address: SocketAddr) -> Daemon {
    let mut command = godwit();
    command.args(["controller", "--listen", &address.to_string(), "--state"]).arg(place.path("state"));
    command.arg("--credentials").arg(place.path("controller")).stderr(Stdio::null());
    let daemon = Daemon(command.spawn().unwrap());
    for _ in 0..4800 {
        if TcpStream::connect(address).is_ok() {
            return daemon;
        }
        std::thread::sleep(Duration::from_millis(25));
    }
    panic!("the controller does not listen");
}

/// At an address of this machine's that nobody else uses, so that it is still free when the daemon listens.
fn free_address() -> SocketAddr {
    static USED: AtomicU8 = AtomicU8::new(1);
    let own = [127, 79, (std::process::id() % 250) as u8, USED.fetch_add(1, Ordering::Relaxed)];
    TcpListener::bind(SocketAddr::from((own, 0))).unwrap().local_addr().unwrap()
}

#[test]
fn what_a_controller_was_told_outlives_its_kill() {
    let (place, address) = (Place::new(), free_address());
    let daemon = start_controller(&place, address);
    for words in ["site add east", "host add ohio --site east --api 127.0.0.1:9", "component add lan --switch br0"] {
        let (code, _, error) = run(&mut place.ann(address, words));
        assert_eq!(code, 0, "{error}");
    }
    // SIGKILL.
    drop(daemon);
    let (code, _, error) = run(&mut place.ann(address, "site ls"));
    assert_eq!(code, 4);
    assert!(error.contains("cannot reach controller/controller"), "{error}");

    let daemon = start_controller(&place, address);
    let (code, said, _) = run(&mut place.ann(address, "component ls"));
    assert_eq!((code, said.as_str()), (0, "NAME  KIND    HOST  BRIDGE\nlan   switch  -     br0\n"));
    let (_, said, _) = run(&mut place.ann(address, "host ls --json"));
    let hosts: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&hosts[0]["name"], &hosts[0]["facts"]), (&json!("ohio"), &Value::Null));
    let (code, _, error) = run(&mut place.ann(address, "vm show web"));
    assert_eq!(code, 1);
    assert!(error.contains("there is no VM `web`; `godwit vm ls`"), "{error}");

    // SIGTERM ends it cleanly.
    let mut daemon = daemon;
    let (code, ..) = run(Command::new("kill").arg(daemon.0.id().to_string()));
    assert_eq!(code, 0);
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
}

/// What the fake controller says of its one move.
#[derive(Clone, Default)]
struct Script {
    outcome: Arc<Mutex<String>>,
    cancelled: Arc<Mutex<bool>>,
}

fn a_move(outcome: &str) -> Move {
    serde_json::from_value(json!({
        "id": 7, "vm": "web", "from": "ohio", "to": "texas", "disk": "mirror", "ordered_unix_us": 1,
        "memory": 67108864, "disks": 0,
        "progress": {
            "outcome": outcome, "phase": "memory",
            "phases": [{"name": "reserve", "started_unix_us": 1, "ended_unix_us": 2}],
            "bytes": {"memory": 1, "disk": 2, "control": 3}, "raw": 4, "zero_pages": 5, "rounds": [],
            "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": false},
            "memory_remaining": 0, "dirty_rate": 0, "rate": 0,
            "error": (outcome == "failed").then_some("the cable is cut")
        }
    }))
    .unwrap()
}

async fn order(Json(order): Json<StartMove>) -> Result<Json<Value>, ApiError> {
    let blocker = json!({"host": "texas", "kind": "memory", "message": "too little memory", "remedy": "make room"});
    let blockers = if order.to.as_str() == "full" { vec![blocker] } else { vec![] };
    if order.dry_run {
        let dry: DryRun =
            serde_json::from_value(json!({"vm": order.vm, "from": "ohio", "to": "texas", "blockers": blockers}))
                .unwrap();
        return Ok(Json(json!(dry)));
    }
    if !blockers.is_empty() {
        return Err(ApiError::new(Problem::Blocked, "too little memory").remedy("make room"));
    }
    Ok(Json(json!(a_move("running"))))
}

fn fake_controller(place: &Place) -> (SocketAddr, Script, tokio::runtime::Runtime) {
    let script = Script::default();
    *script.outcome.lock().unwrap() = "running".into();
    let router = Router::new()
        .route(
            "/v1/moves",
            get(|State(s): State<Script>| async move { Json(vec![a_move(&s.outcome.lock().unwrap())]) }).post(order),
        )
        .route(
            "/v1/moves/{id}",
            get(|State(s): State<Script>, Path(_): Path<u64>| async move { Json(a_move(&s.outcome.lock().unwrap())) }),
        )
        .route(
            "/v1/moves/{id}/cancel",
            post(|State(s): State<Script>, Path(_): Path<u64>| async move {
                *s.cancelled.lock().unwrap() = true;
                Json(a_move("cancelled"))
            }),
        )
        .with_state(script.clone());
    let credentials = Credentials::load(&place.path("controller")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move { serve(listener, router, &credentials, std::future::pending()).await });
    (address, script, runtime)
}

#[test]
fn the_exit_code_tells_how_a_move_ended() {
    let place = Place::new();
    let (address, script, _runtime) = fake_controller(&place);
    for (outcome, expected, said) in
        [("completed", 0, ""), ("failed", 1, "the cable is cut"), ("cancelled", 5, "was cancelled")]
    {
        *script.outcome.lock().unwrap() = outcome.into();
        let (code, lines, error) = run(&mut place.ann(address, "move web --to texas"));
        assert_eq!(code, expected, "{error}");
        assert!(error.contains(said), "{error}");
        // Off a terminal: a line of JSON as the API has it, when it begins, and when it ends.
        let moves: Vec<Move> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((moves.first(), moves.last()), (Some(&a_move("running")), Some(&a_move(outcome))));
    }
    for (words, expected) in [
        ("move web --to texas --dry-run", 0),
        ("move web --to full --dry-run", 3),
        ("move web --to full", 3),
        ("move web --to texas --detach", 0),
        ("move web", 2),
        ("move web --to texas --limit fast", 2),
        ("move show web", 0),
        ("move show 7", 0),
        ("move show Web", 2),
        ("move show mail", 1),
    ] {
        let (code, _, error) = run(&mut place.ann(address, words));
        assert_eq!(code, expected, "{words}: {error}");
    }
    let (_, said, _) = run(&mut place.ann(address, "move web --to full --dry-run"));
    assert!(said.contains("texas (memory): too little memory; make room"), "{said}");
    assert!(!*script.cancelled.lock().unwrap());
    assert_eq!(run(&mut place.ann(address, "move web --cancel")).0, 0);
    assert!(*script.cancelled.lock().unwrap());
}

#[test]
fn an_interrupted_follower_leaves_the_move_alone_and_says_so() {
    let place = Place::new();
    let (address, script, _runtime) = fake_controller(&place);
    let mut follower = place.ann(address, "move web --to texas");
    let mut follower = follower.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    // It waits between two looks, ^C in hand, by the time of its second line.
    for _ in 0..2 {
        lines.next().unwrap().unwrap();
    }
    run(Command::new("kill").args(["-INT", &follower.id().to_string()]));
    let Output { status, stderr, .. } = follower.wait_with_output().unwrap();
    assert_eq!(status.code(), Some(130));
    let said = String::from_utf8(stderr).unwrap();
    assert!(said.contains("goes on") && said.contains("godwit move web --cancel"), "{said}");
    assert!(!*script.cancelled.lock().unwrap());
}

#[test]
fn credentials_that_are_missing_are_named() {
    let place = Place::new();
    let mut command = godwit();
    let (code, _, error) = run(command.args(["site", "ls", "--credentials"]).arg(place.path("nobody")));
    assert_eq!(code, 1);
    assert!(error.contains("nobody"), "{error}");
}

#[test]
fn completions_and_manual_pages_are_written() {
    let place = Place::new();
    let (code, script, _) = run(godwit().args(["completion", "bash"]));
    assert!(code == 0 && script.contains("_godwit"));
    let pages = place.path("man");
    assert_eq!(run(godwit().args(["man", "--out"]).arg(&pages)).0, 0);
    let exists = |page: &str| FilePath::new(&pages).join(page).exists();
    assert!(exists("godwit.1") && exists("godwit-move.1") && exists("godwit-vm-create.1"));
}
