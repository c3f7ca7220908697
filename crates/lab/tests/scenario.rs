//! Scenario files are an interface: the documented one is read, and each mistake is named with its line and its key.

use godwit_lab::scenario::{Action, Baseline, DiskStrategy, Image, Network, Point, Runs, Scenario, Victim};
use godwit_units::Policy;
use proptest::prelude::*;

const BURST: &str = r#"name = "burst"
baseline = ["qemu"]          # the same move without Godwit: qemu | qemu-block | qemu-xbzrle | qemu-multifd-zstd
repeat = 1
[wan]                        # between every two sites unless [[wan.path]] says otherwise
rate_mbit = 100
rtt_ms = 27
jitter_ms = 0
loss = 0.0
queue_ms = 50                # drop-tail
[[site]]
name = "illinois"
[[site]]
name = "texas"
[[site]]
name = "california"          # where clients run
[[vm]]
name = "web"
site = "illinois"
image = "tiny"               # tiny: Debian cloud kernel + busybox + the load program; debian: a full Debian guest
memory_mib = 512
vcpus = 1
disk_gib = 4                 # or disks_gib = [4, 1, 1]
load = [
  { kind = "memory", pages_per_s = 2000, pattern = "uniform", working_set_mib = 64, bytes_per_page = 64 },
  { kind = "disk", kib_per_s = 512, working_set_mib = 256 },
  { kind = "echo", from = "california", per_s = 100 },
]
[[step]]
after_s = 5
move = { vm = "web", to = "texas", disk = "mirror", policy = "least-downtime" }
[[step]]
verify = { vm = "web" }      # the guest's own memory and disk checks, replicas compared, TCP session alive
"#;

/// The documented scenario with one thing changed, which has to be there once.
fn burst_with(old: &str, new: &str) -> String {
    assert_eq!(BURST.matches(old).count(), 1, "`{old}` stands in the scenario once");
    BURST.replace(old, new)
}

/// The scenario is refused, and the message names this line and this key (or value).
#[track_caller]
fn refused(text: &str, line: usize, key: &str) {
    let error = match Scenario::parse(text, "burst.toml") {
        Ok(_) => panic!("the scenario was accepted"),
        Err(e) => e.to_string(),
    };
    let named = error.contains(&format!("line {line},")) || error.contains(&format!("burst.toml:{line}:"));
    assert!(named, "line {line} is not named in: {error}");
    assert!(error.contains(key), "`{key}` is not named in: {error}");
    assert!(error.starts_with("burst.toml:"), "the file is named first: {error}");
}

#[test]
fn clients_of_a_gateway_are_in_the_last_site_and_only_godwit_leads_to_it() {
    let gateway = burst_with("repeat = 1", "network = \"gateway\"");
    refused(&gateway, 1, "baseline");
    let alone = gateway.replace("baseline = [\"qemu\"] ", "");
    assert_eq!(Scenario::parse(&alone, "burst.toml").unwrap().network, Network::Gateway);
    assert_eq!(Scenario::parse(BURST, "burst.toml").unwrap().network, Network::Switch);
    refused(&alone.replace("from = \"california\"", "from = \"texas\""), 26, "`texas`");
    refused(&burst_with("repeat = 1", "network = \"hub\""), 3, "hub");
}

#[test]
fn the_documented_scenario_is_read_as_it_is_meant() {
    let scenario = Scenario::parse(BURST, "burst.toml").unwrap();
    assert_eq!((scenario.name.get_ref().as_str(), scenario.repeat, scenario.godwit), ("burst", 1, true));
    assert_eq!(scenario.baseline, [Baseline::Qemu]);
    let path = scenario.path_spec("illinois", "texas");
    assert_eq!((path.rate.mbit(), path.rtt.as_millis(), path.queue.as_millis()), (100.0, 27, 50));
    let vm = &scenario.vm[0];
    assert_eq!((vm.image, *vm.memory_mib.get_ref(), vm.load.len()), (Image::Tiny, 512, 3));
    assert_eq!(vm.disks().iter().map(|d| d.0).collect::<Vec<_>>(), [4 << 30]);
    assert_eq!(vm.data_set_mib(), Some(1024));
    assert_eq!(vm.echoes().collect::<Vec<_>>(), [("california", 100)]);
    assert_eq!(scenario.step.len(), 2);
    assert_eq!(scenario.step[0].after_s, 5.0);
    match &scenario.step[0].action {
        Action::Move(m) => assert_eq!((m.disk, m.policy), (DiskStrategy::Mirror, Some(Policy::LeastDowntime))),
        other => panic!("{other:?}"),
    }
    assert!(matches!(scenario.step[1].action, Action::Verify(_)));
}

#[test]
fn an_unknown_key_is_named_wherever_it_stands() {
    refused(&burst_with("repeat = 1", "repeats = 1"), 3, "repeats");
    refused(&burst_with("jitter_ms = 0", "jitter = 0"), 7, "jitter");
    refused(&burst_with("vcpus = 1", "cpus = 1"), 21, "cpus");
    refused(&burst_with("after_s = 5", "after = 5"), 29, "after");
    refused(&burst_with("disk = \"mirror\"", "disks = \"mirror\""), 30, "disks");
}

#[test]
fn a_value_of_the_wrong_kind_is_named() {
    refused(&burst_with("repeat = 1", "repeat = \"once\""), 3, "repeat");
    refused(&burst_with("rate_mbit = 100", "rate_mbit = \"fast\""), 5, "rate_mbit");
    refused(&burst_with("memory_mib = 512", "memory_mib = -512"), 20, "memory_mib");
    refused(&burst_with("[\"qemu\"]", "[\"xen\"]"), 2, "xen");
    refused(&burst_with("image = \"tiny\"", "image = \"huge\""), 19, "huge");
}

#[test]
fn a_baseline_has_patience_for_some_rounds() {
    assert_eq!(*Scenario::parse(BURST, "burst.toml").unwrap().patience_rounds.get_ref(), 30);
    let with = |rounds: u32| burst_with("repeat = 1", &format!("patience_rounds = {rounds}"));
    assert_eq!(*Scenario::parse(&with(6), "burst.toml").unwrap().patience_rounds.get_ref(), 6);
    refused(&with(0), 3, "patience_rounds");
    refused(&with(1001), 3, "patience_rounds");
}

#[test]
fn a_load_that_is_not_understood_is_named() {
    refused(&burst_with("kib_per_s = 512", "kib_per_h = 512"), 25, "kib_per_h");
    // The field of a tagged table is not known any more when its value turns out to be of the wrong kind.
    refused(&burst_with("pages_per_s = 2000", "pages_per_s = \"many\""), 24, "\"many\"");
    refused(&burst_with("working_set_mib = 64", "working_set_mib = 0"), 24, "vm.load");
    refused(&burst_with("from = \"california\"", "from = \"nevada\""), 26, "nevada");
}

#[test]
fn a_step_that_names_what_is_not_there_is_refused() {
    refused(&burst_with("to = \"texas\"", "to = \"nevada\""), 30, "step.move.to");
    refused(&burst_with("verify = { vm = \"web\" }", "verify = { vm = \"db\" }"), 32, "step.verify.vm");
    refused(&burst_with("site = \"illinois\"", "site = \"nevada\""), 18, "vm.site");
    let cut = format!("{BURST}[[step]]\ncut = {{ between = [\"texas\", \"nevada\"] }}\n");
    refused(&cut, 34, "step.cut.between");
}

#[test]
fn several_vms_are_moved_in_one_order_each_once_and_with_what_holds_for_all() {
    let second = BURST.replacen("[[step]]", &format!("{}[[step]]", second_vm()), 1);
    let ordered = |keys: &str| second.replace("vm = \"web\", to = \"texas\"", keys);
    let both = "vms = [\"web\", \"db\"], to = \"texas\", keep_checkpoint = true";
    let scenario = Scenario::parse(&ordered(both), "burst.toml").unwrap();
    let Action::Move(order) = &scenario.step[0].action else { panic!("{:?}", scenario.step[0]) };
    let named: Vec<&str> = order.vms.iter().map(|vm| vm.get_ref().as_str()).collect();
    assert_eq!((named, order.keep_checkpoint), (vec!["web", "db"], true));
    let one = Scenario::parse(BURST, "burst.toml").unwrap();
    assert!(matches!(&one.step[0].action, Action::Move(m) if m.vms.len() == 1 && !m.keep_checkpoint));

    let said = |keys: &str| Scenario::parse(&ordered(keys), "burst.toml").unwrap_err().to_string();
    for (keys, what) in [
        ("vms = [\"web\", \"mail\"], to = \"texas\"", "there is no VM `mail`"),
        ("vms = [\"web\", \"web\"], to = \"texas\"", "`web` is there twice"),
        ("vms = [\"web\"], to = \"texas\"", "two or more"),
        ("vm = \"web\", vms = [\"web\", \"db\"], to = \"texas\"", "one of `vm`, `vms` and `component`"),
        ("vms = [\"web\", \"db\"], to = \"texas\", retry = true", "takes no `retry`"),
        ("vms = [\"web\", \"db\"], to = \"texas\", moment = { period_s = 20 }", "takes no `retry`"),
        ("component = \"sw\", to = \"texas\", keep_checkpoint = true", "nothing else"),
    ] {
        assert!(said(keys).contains(what), "{keys}: {}", said(keys));
    }
}

#[test]
fn a_vms_trust_domain_is_a_name_as_godwit_has_them() {
    let of = |domain: &str| burst_with("image = \"tiny\"", &format!("domain = \"{domain}\" #"));
    let scenario = Scenario::parse(&of("developers"), "burst.toml").unwrap();
    assert_eq!(scenario.vm[0].domain.as_ref().map(|domain| domain.get_ref().as_str()), Some("developers"));
    refused(&of("My Company"), 19, "vm.domain");
    assert!(Scenario::parse(BURST, "burst.toml").unwrap().vm[0].domain.is_none());
}

#[test]
fn a_tier_commits_to_a_disk_and_its_clients_are_known() {
    let load = "{ kind = \"tier\", port = 5432, commits_to = 1, from = \"texas\", sessions = 4 }";
    let text = burst_with("{ kind = \"echo\", from = \"california\", per_s = 100 }", load);
    let scenario = Scenario::parse(&text, "burst.toml").unwrap();
    assert_eq!(scenario.vm[0].asked().collect::<Vec<_>>(), [("texas", 5432, 4, 0)]);
    refused(&text.replace("commits_to = 1", "commits_to = \"disk\""), 26, "disk");
    refused(&text.replace("commits_to = 1", "transacts = true"), 26, "no database");
}

/// Another VM beside the documented one.
fn second_vm() -> String {
    "[[vm]]\nname = \"db\"\nsite = \"illinois\"\nmemory_mib = 128\ndisk_gib = 1\n".into()
}

#[test]
fn a_step_does_exactly_one_thing() {
    refused(&burst_with("after_s = 5\n", "verify = { vm = \"web\" }\n"), 28, "one thing");
    refused(&format!("{BURST}[[step]]\nafter_s = 1\n"), 33, "a step needs one of");
    refused(&burst_with("after_s = 5", "after_s = -5"), 28, "after_s");
}

/// The documented scenario with one more step, which begins in line 33.
fn burst_and(step: &str) -> String {
    format!("{BURST}[[step]]\n{step}\n")
}

#[test]
fn something_may_happen_at_a_point_of_a_move() {
    let read = |step: &str| Scenario::parse(&burst_and(step), "burst.toml").unwrap().step.remove(2).action;
    match read(r#"kill = { what = "node", at = "copy-disk", vm = "web" }"#) {
        Action::Kill(kill) => {
            assert_eq!(
                (*kill.what.get_ref(), kill.at, kill.restart_after_s),
                (Victim::Node, Some(Point::CopyDisk), 2.0)
            );
        }
        other => panic!("{other:?}"),
    }
    match read(r#"cut = { between = ["texas", "illinois"], at = "sealed", vm = "web", for_s = 10 }"#) {
        Action::Cut(cut) => assert_eq!((cut.at, cut.for_s), (Some(Point::Sealed), Some(10.0))),
        other => panic!("{other:?}"),
    }
    match read(r#"expect = { vm = "web", site = "texas" }"#) {
        Action::Expect(expect) => {
            assert_eq!((expect.runs, expect.site.unwrap().get_ref().as_str()), (Runs::One, "texas"))
        }
        other => panic!("{other:?}"),
    }
    // What it was before there were points.
    assert!(matches!(read(r#"cut = { between = ["texas", "illinois"] }"#), Action::Cut(cut) if cut.at.is_none()));
}

#[test]
fn what_is_to_be_killed_has_to_be_known() {
    let refused = |step: &str, key: &str| refused(&burst_and(step), 34, key);
    refused(r#"kill = { what = "node" }"#, "step.kill.site");
    refused(r#"kill = { what = "node", at = "sealed" }"#, "step.kill.vm");
    refused(r#"kill = { what = "node", site = "nevada" }"#, "step.kill.site");
    refused(r#"kill = { what = "qemu", site = "texas" }"#, "step.kill.vm");
    refused(r#"kill = { what = "controller", site = "texas" }"#, "step.kill.site");
    refused(r#"kill = { what = "controller", restart_after_s = -1 }"#, "restart_after_s");
    refused(r#"kill = { what = "node", site = "texas", vm = "db" }"#, "step.kill.vm");
    refused(r#"cut = { between = ["texas", "illinois"], at = "sealed" }"#, "step.cut.vm");
    refused(r#"cut = { between = ["texas", "illinois"], for_s = -1 }"#, "step.cut.for_s");
    refused(r#"expect = { vm = "db" }"#, "step.expect.vm");
    refused(r#"expect = { vm = "web", site = "nevada" }"#, "step.expect.site");
    refused(r#"expect = { vm = "web", runs = "twice" }"#, "twice");
    refused(r#"kill = { what = "node", at = "sealde", vm = "web" }"#, "sealde");
}

/// Godwit's alone: two guests with a port each, a firewall between, wires. Line numbers are those of the documented scenario.
fn wired(more: &str) -> String {
    let alone = burst_with("baseline = [\"qemu\"] ", "").replace("vcpus = 1", "nic = [{ address = \"10.20.1.2/24\" }]");
    format!(
        "{alone}[[component]]\nname = \"fw\"\nkind = \"firewall\"\nsite = \"illinois\"\nports = 2\n\
         [[wire]]\nends = [\"web:eth1\", \"fw:p1\"]\n{more}\n"
    )
}

#[test]
fn components_and_wires_are_read_and_a_component_moves_by_a_step() {
    let text = wired("[[step]]\nmove = { component = \"fw\", to = \"texas\" }");
    let mut scenario = Scenario::parse(&text, "burst.toml").unwrap();
    assert_eq!(
        (*scenario.component[0].ports.get_ref(), scenario.component[0].kind.get_ref().as_str()),
        (2, "firewall")
    );
    assert_eq!(scenario.wire[0].ends.get_ref(), &["web:eth1".to_owned(), "fw:p1".to_owned()]);
    let nic = &scenario.vm[0].nic[0];
    assert_eq!((nic.port(0), nic.ip(), nic.mtu), ("eth1".into(), Some([10, 20, 1, 2].into()), 1500));
    match scenario.step.remove(2).action {
        Action::Component(step) => assert_eq!(step.to.get_ref(), "texas"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wire_ends_at_ports_that_there_are_and_each_port_has_one() {
    let refused = |more: &str, key: &str| refused(&wired(more), 41, key);
    refused("[[wire]]\nends = [\"web:eth2\", \"fw:p2\"]", "eth1");
    refused("[[wire]]\nends = [\"web:eth0\", \"fw:p2\"]", "wire.ends");
    refused("[[wire]]\nends = [\"fw:p3\", \"fw:p2\"]", "p1, p2");
    refused("[[wire]]\nends = [\"db:eth1\", \"fw:p2\"]", "`db`");
    refused("[[wire]]\nends = [\"fw\", \"fw:p2\"]", "OBJECT:PORT");
    refused("[[wire]]\nends = [\"fw:p2\", \"web:eth1\"]", "has a wire already");
    refused("[[component]]\nname = \"web\"\nkind = \"switch\"\nsite = \"texas\"\nports = 2", "there twice");
    refused("[[component]]\nname = \"lan\"\nkind = \"switch\"\nsite = \"texas\"\nports = 2", "there twice");
    refused("[[step]]\nmove = { component = \"sw\", to = \"texas\" }", "step.move.component");
}

#[test]
fn components_are_godwits_and_have_neither_disks_nor_memory() {
    let both = wired("").replace("repeat = 1\n", "repeat = 1\nbaseline = [\"qemu\"]\n");
    refused(&both, 1, "baseline");
    let refused = |step: &str, key: &str| refused(&burst_and(step), 33, key);
    refused("move = { component = \"fw\", to = \"texas\", disk = \"mirror\" }", "no disk");
    refused("move = { component = \"fw\", vm = \"web\", to = \"texas\" }", "one of");
    refused("move = { to = \"texas\" }", "one of");
}

#[test]
fn an_interface_has_an_address_and_a_route_says_by_whom() {
    let with = |key: &str| burst_with("baseline = [\"qemu\"] ", "").replace("vcpus = 1", key);
    refused(&with("nic = [{ address = \"10.20.1.2\" }]"), 21, "vm.nic.address");
    refused(&with("nic = [{ address = \"10.20.1.2/24\", name = \"eth0\" }]"), 21, "vm.nic.name");
    refused(&with("nic = [{ address = \"10.20.1.2/24\", mtu = 100 }]"), 21, "vm.nic.mtu");
    refused(&with("routes = [\"10.20.1.0/24\"]"), 21, "via");
    assert!(Scenario::parse(&with("routes = [\"10.20.1.0/24 via 10.20.1.1\"]"), "burst.toml").is_ok());
}

#[test]
fn a_tier_has_its_clients_in_a_site_that_there_is() {
    let echo = "{ kind = \"echo\", from = \"california\", per_s = 100 }";
    let with = |load: &str| burst_with(echo, load);
    let good = with("{ kind = \"tier\", port = 80, asks = \"10.20.1.2:80\", from = \"california\", sessions = 3 }");
    let scenario = Scenario::parse(&good, "burst.toml").unwrap();
    assert_eq!(scenario.vm[0].asked().collect::<Vec<_>>(), [("california", 80, 3, 0)]);
    refused(&with("{ kind = \"tier\", port = 80, from = \"nevada\" }"), 26, "nevada");
    refused(&with("{ kind = \"tier\", port = 80, asks = \"nowhere\" }"), 26, "vm.load");
    refused(&with("{ kind = \"tier\", port = 80, times = 0 }"), 26, "times");
}

#[test]
fn every_scenario_of_ours_is_read() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut read = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        if !path.to_string_lossy().ends_with(".sweep.toml") {
            Scenario::load(&path).unwrap();
            read += 1;
        }
    }
    assert!(read > 10);
}

#[test]
fn what_measures_wires_has_nothing_else_to_do() {
    let text = |more: &str| {
        format!(
            "name = \"wires\"\n[speed]\n{more}\n[wan]\nrate_mbit = 1\nrtt_ms = 0\n[[site]]\nname = \"a\"\n[[site]]\nname = \"b\"\n"
        )
    };
    assert!(Scenario::parse(&text("ways = [\"vxlan\", \"wire\"]\nlinks = 4"), "burst.toml").is_ok());
    refused(&text("ways = []"), 2, "ways");
    refused(&text("ways = [\"wire\"]\nlinks = 65"), 2, "links");
    refused(&text("ways = [\"plain-chain\"]"), 2, "chain");
    let vm = "[[vm]]\nname = \"web\"\nsite = \"a\"\nmemory_mib = 128\ndisk_gib = 1\n";
    refused(&format!("{}{vm}", text("ways = [\"wire\"]")), 2, "[[vm]]");
}

#[test]
fn where_godwit_moves_names_are_those_that_godwit_takes() {
    refused(&burst_with("name = \"texas\"", "name = \"1texas\""), 13, "site.name");
    refused(&burst_with("name = \"texas\"", "name = \"texas-\""), 13, "site.name");
    let alone = burst_with("repeat = 1\n", "godwit = false\n");
    let renamed = alone.replace("\"texas\"", "\"1texas\"");
    assert!(Scenario::parse(&renamed, "burst.toml").is_ok(), "baselines are not that particular");
}

#[test]
fn a_guest_needs_a_disk_that_holds_its_data() {
    let without = burst_with("disk_gib = 4                 # or disks_gib = [4, 1, 1]\n", "");
    refused(&without, 17, "vm.disk_gib");
    refused(&burst_with("disk_gib = 4  ", "disk_gib = 4\ndisks_gib = [4]  "), 23, "vm.disks_gib");
    refused(&burst_with("disk_gib = 4  ", "disk_gib = 1\ndata_mib = 1024  "), 23, "vm.data_mib");
    // By QEMU's own copy of disks, which needs whole MiB.
    let by_block = burst_with("disk_gib = 4  ", "disk_gib = 4.1  ").replace("[\"qemu\"] ", "[\"qemu-block\"] ");
    refused(&by_block, 22, "vm.disks_gib");
    Scenario::parse(&by_block.replace("4.1", "4.125"), "burst.toml").unwrap();
    refused(&burst_with("disk_gib = 4  ", "disk_gib = 4\ndata_mib = 100  "), 23, "vm.data_mib");
}

#[test]
fn names_are_given_once_and_fit_into_file_names() {
    refused(&burst_with("name = \"texas\"", "name = \"illinois\""), 13, "site.name");
    refused(&burst_with("name = \"texas\"", "name = \"../texas\""), 13, "site.name");
    let twice = format!("{BURST}[[vm]]\nname = \"web\"\nsite = \"texas\"\nmemory_mib = 128\ndisk_gib = 1\n");
    refused(&twice, 34, "vm.name");
}

#[test]
fn extenders_and_recordings_name_sites_and_objects_with_wires() {
    let with = |more: &str| {
        let wired = burst_with("disk_gib = 4 ", "nic = [{ address = \"10.20.1.2/24\" }]\ndisk_gib = 4 ");
        let wired = wired.replace("baseline = [\"qemu\"]", "");
        let sw = "[[component]]\nname = \"sw\"\nkind = \"switch\"\nsite = \"texas\"\nports = 1\n";
        format!("{wired}{sw}[[wire]]\nends = [\"web:eth1\", \"sw:p1\"]\n{more}")
    };
    let joined = "[[extender]]\nbetween = [\"illinois\", \"texas\"]\n";
    let fine = format!(
        "{joined}[[step]]\ncapture = {{ of = \"sw\", s = 60 }}\n[[step]]\nkill = {{ what = \"extender\", site = \"texas\" }}\n"
    );
    let scenario = Scenario::parse(&with(&fine), "burst.toml").unwrap();
    assert!(scenario.carries("illinois") && scenario.carries("texas") && !scenario.carries("california"));
    let refused = |more: &str, key: &str, what: &str| {
        let said = Scenario::parse(&with(more), "burst.toml").unwrap_err().to_string();
        assert!(said.contains(&format!("`{key}`")) && said.contains(what), "{more}: {said}");
    };
    refused("[[extender]]\nbetween = [\"illinois\", \"ohio\"]\n", "extender.between", "no site `ohio`");
    refused("[[extender]]\nbetween = [\"texas\", \"texas\"]\n", "extender.between", "twice");
    let again = format!("{joined}[[extender]]\nbetween = [\"texas\", \"illinois\"]\n");
    refused(&again, "extender.between", "already");
    let step = |text: &str| format!("[[step]]\n{text}\n");
    refused(&step("kill = { what = \"extender\", site = \"texas\" }"), "step.kill.site", "no [[extender]]");
    refused(&step("kill = { what = \"extender\" }"), "step.kill.site", "is missing");
    refused(&step("capture = { of = \"lan\", s = 5 }"), "step.capture.of", "no end of a [[wire]]");
    refused(&step("capture = { of = \"web\", s = 61 }"), "step.capture.s", "1 to 60");
    refused(&step("capture = { of = \"web\", s = 5, name = \"../x\" }"), "step.capture.name", "a-z");
    let twice = format!("{}{}", step("capture = { of = \"web\", s = 5 }"), step("capture = { of = \"web\", s = 5 }"));
    refused(&twice, "step.capture.name", "twice");
}

#[test]
fn flows_and_second_hosts_are_refused_where_the_lab_would_not_follow_them() {
    let with = |carriers: &str, more: &str| {
        let wired = burst_with("disk_gib = 4 ", "nic = [{ address = \"10.20.1.2/24\" }]\ndisk_gib = 4 ");
        let wired = wired.replace("baseline = [\"qemu\"]", "");
        let wired = wired.replace("name = \"california\"", &format!("name = \"california\"\n{carriers}"));
        let sw = "[[component]]\nname = \"gate\"\nkind = \"router\"\nsite = \"california\"\nports = 1\n";
        format!("{wired}{sw}[[wire]]\nends = [\"web:eth1\", \"gate:p1\"]\n{more}")
    };
    let joined = "[[extender]]\nbetween = [\"illinois\", \"california\"]\n";
    let flow = |from: &str, to: &str, per_s: u32| {
        format!("[[flow]]\nfrom = \"{from}\"\nto = \"{to}\"\nkind = \"udp\"\nper_s = {per_s}\n")
    };
    let whole = "[[step]]\nkill = { what = \"controller\" }\n[[step]]\nwhole = {}\n";
    let fine = format!("{joined}{}{whole}", flow("gate", "web:eth1", 100));
    let scenario = Scenario::parse(&with("carriers = 2", &fine), "burst.toml").unwrap();
    assert_eq!(scenario.flow_target(&scenario.flow[0]), Some([10, 20, 1, 2].into()));
    let seconds: Vec<_> = scenario.site.iter().filter_map(|site| site.second()).collect();
    assert_eq!(seconds, ["california-2"]);

    let refused = |carriers: &str, more: &str, key: &str, what: &str| {
        let said = Scenario::parse(&with(carriers, more), "burst.toml").unwrap_err().to_string();
        assert!(said.contains(&format!("`{key}`")) && said.contains(what), "{more}: {said}");
    };
    refused("", &flow("sw", "web:eth1", 100), "flow.from", "no component `sw`");
    refused("", &flow("gate", "web:eth0", 100), "flow.to", "web:eth0");
    refused("", &flow("gate", "gate:p1", 100), "flow.to", "gate:p1");
    refused("", &flow("gate", "web:eth1", 0), "flow.per_s", "is 0");
    refused("", &flow("gate", "web:eth1", 1001), "flow.per_s", "is 1001");
    let moved = "[[step]]\nmove = { component = \"gate\", to = \"illinois\" }\n";
    refused("", &format!("{}{moved}", flow("gate", "web:eth1", 1)), "flow.from", "moves");
    refused("carriers = 3", joined, "site.carriers", "is 3");
    refused("carriers = 2", "", "site.carriers", "no [[extender]]");
    let comes = "[[step]]\nmove = { vm = \"web\", to = \"california\" }\n";
    refused("carriers = 2", &format!("{joined}{comes}"), "site.carriers", "either host");
}

#[test]
fn the_wan_refuses_what_no_link_does() {
    refused(&burst_with("loss = 0.0", "loss = 1.5"), 8, "wan.loss");
    refused(&burst_with("loss = 0.0", "loss = -0.1"), 8, "wan.loss");
    refused(&burst_with("loss = 0.0", "loss = nan"), 8, "wan.loss");
    refused(&burst_with("rate_mbit = 100", "rate_mbit = 0"), 5, "wan.rate_mbit");
    let path = "[[wan.path]]\nbetween = [\"texas\", \"illinois\"]\nloss = 7.0\n[[site]]\nname = \"illinois\"";
    refused(&burst_with("[[site]]\nname = \"illinois\"", path), 11, "wan.path");
}

#[test]
fn a_number_that_no_clock_and_no_link_has_is_refused_where_it_stands() {
    let numbers = ["inf", "nan", "-1", "1e300"];
    for number in numbers {
        refused(&burst_and(&format!("wait = {{ s = {number} }}")), 33, "wait.s");
    }
    for (figure, number) in ["rate_mbit", "rtt_ms", "jitter_ms", "loss", "queue_ms"]
        .into_iter()
        .flat_map(|figure| numbers.map(|number| (figure, number)))
    {
        let between = "between = [\"texas\", \"illinois\"]";
        let path = format!("[[wan.path]]\n{between}\n{figure} = {number}\n[[site]]\nname = \"illinois\"");
        refused(&burst_with("[[site]]\nname = \"illinois\"", &path), 11, &format!("wan.path.{figure}"));
        refused(
            &burst_and(&format!("rate = {{ {between}, {figure} = {number} }}")),
            34,
            &format!("step.rate.{figure}"),
        );
    }
    for number in ["0", "86401", "9223372036854775807"] {
        refused(&burst_with("repeat = 1", &format!("move_timeout_s = {number}")), 3, "move_timeout_s");
    }
}

#[test]
fn an_exception_holds_for_its_path_in_both_directions_and_for_no_other() {
    let path = "[[wan.path]]\nbetween = [\"texas\", \"illinois\"]\nrtt_ms = 100\n[[site]]\nname = \"illinois\"";
    let scenario = Scenario::parse(&burst_with("[[site]]\nname = \"illinois\"", path), "burst.toml").unwrap();
    let rtt = |a, b| scenario.path_spec(a, b).rtt.as_millis();
    assert_eq!((rtt("illinois", "texas"), rtt("texas", "illinois"), rtt("texas", "california")), (100, 100, 27));
    assert_eq!(scenario.path_spec("illinois", "texas").rate.mbit(), 100.0);
}

#[test]
fn text_that_is_not_toml_is_refused_with_its_line() {
    refused(&burst_with("[wan] ", "[wan "), 4, "wan");
    refused(&burst_with("repeat = 1", "repeat = 1\nrepeat = 2"), 4, "repeat");
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,400}") {
        let _ = Scenario::parse(&text, "any.toml");
    }

    #[test]
    fn no_damage_to_a_good_scenario_makes_the_parser_panic(
        at in 0..BURST.len(),
        length in 0..40usize,
        insert in "[-\\[\\]{}=\"'.,#0-9a-z\n]{0,12}",
    ) {
        let end = (at + length).min(BURST.len());
        let _ = Scenario::parse(&format!("{}{insert}{}", &BURST[..at], &BURST[end..]), "any.toml");
    }

    #[test]
    fn no_number_makes_the_parser_panic(value: f64, whole: i64, key in 0..6usize) {
        let (old, new) = [
            ("rate_mbit = 100", format!("rate_mbit = {value:?}")),
            ("rtt_ms = 27", format!("rtt_ms = {whole}")),
            ("queue_ms = 50", format!("queue_ms = {value:?}")),
            ("disk_gib = 4 ", format!("disk_gib = {value:?} ")),
            ("after_s = 5", format!("after_s = {value:?}")),
            ("disk_gib = 4 ", format!("disks_gib = [{value:?}, {whole}] ")),
        ][key].clone();
        if let Ok(scenario) = Scenario::parse(&burst_with(old, &new), "any.toml") {
            let _ = scenario.path_spec("illinois", "texas");
            let _ = (scenario.vm[0].disks(), scenario.vm[0].data_set_mib());
        }
    }
}
