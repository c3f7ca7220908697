//! What nodes say to each other, what clients and controllers ask, and files that people write.

use crate::{MIB, Target};
use godwit_api::host::{CheckVm, GatewayPort, MoveOrder, SetLimit, StopVm};
use godwit_api::public::{AddHost, Component, CreateVm, Site, StartMove};
use godwit_api::vm::{VmDefinition, VmSpec};
use godwit_node::proto;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn now<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime without drivers");
    runtime.block_on(future)
}

/// Greetings and frames of the link, from another node.
pub const LINK: Target = Target {
    name: "link",
    corpus: || {
        let data = [&[1][..], &7u64.to_be_bytes(), &5u32.to_be_bytes(), b"hello"].concat();
        let ack = [&[2][..], &12u64.to_be_bytes(), &3u64.to_be_bytes()].concat();
        let end = [&[3][..], &12u64.to_be_bytes(), &[4], &6u32.to_be_bytes()].concat();
        let hello = [&[5; 16][..], &[1; 8], &[0; 8], &2u32.to_be_bytes(), &[0, 0, 0, 0, 0, 0, 0, 1], &[0; 8]].concat();
        let attach = [&[0, 0, 0, 0, 0, 0, 0, 4][..], &[0, 1], &[0; 8], &4u32.to_be_bytes(), b"what"].concat();
        vec![[data, ack, end].concat(), hello, attach]
    },
    run: |input| {
        for understood in now(godwit_link::read_anything(input)) {
            assert!(understood.len() <= input.len().max(64), "more was understood than was said");
        }
    },
    bound: |length| MIB + 8 * length,
};

/// A mirror's messages, as another node packs them.
pub const MIRROR: Target = Target {
    name: "mirror",
    corpus: || vec![b"a".to_vec(), vec![1; 70_000], [vec![0, 0, 0, 9], vec![2; 5000]].concat()],
    run: |input| {
        // First as one message, which has to come back; then as bytes of the wire before compression.
        let (mut packer, mut wire) = (godwit_volume::Packer::new().expect("zstd begins"), vec![]);
        let whole = &input[..input.len().min(60_000)];
        packer.push(whole, &mut wire).and_then(|()| packer.flush(&mut wire)).expect("zstd goes on");
        let mut unpacker = godwit_volume::Unpacker::new().expect("zstd begins");
        unpacker.push(&wire);
        assert_eq!(unpacker.poll().expect("it was packed right").as_deref(), Some(whole));
        for wire in [zstd::encode_all(input, 1).expect("memory takes all"), input.to_vec()] {
            let mut unpacker = godwit_volume::Unpacker::new().expect("zstd begins");
            unpacker.push(&wire);
            while let Ok(Some(_)) = unpacker.poll() {}
        }
    },
    bound: |length| 8 * MIB + 8 * length,
};

/// Parses; what was understood and written again is understood in the same way. Whether it was understood at all.
fn again<T: DeserializeOwned + Serialize>(input: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(input) else { return false };
    let Ok(text) = serde_json::to_vec(&value) else { panic!("what was read cannot be written") };
    let Ok(second) = serde_json::from_slice::<T>(&text) else {
        panic!("what was written cannot be read: {}", String::from_utf8_lossy(&text))
    };
    let (first, second) = (serde_json::to_value(&value), serde_json::to_value(&second));
    let (Ok(first), Ok(second)) = (first, second) else { panic!("what was read cannot be written") };
    assert!(alike(&first, &second), "it reads differently the second time: {first} {second}");
    true
}

/// Equal, but for the last digits of a number with a point, which JSON's reader here does not keep.
fn alike(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| alike(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| alike(a, b)))
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| (a - b).abs() <= a.abs() * 1e-12)
        }
        _ => a == b,
    }
}

fn peer() -> Value {
    let link = json!({"control": "10.0.0.1:1", "disk": "10.0.0.1:2", "memory": "[fe80::1]:3"});
    json!({"name": "b", "link": link, "underlay": "10.0.0.1"})
}

fn definition() -> Value {
    let gateway = json!({"id": 3, "component": {"gateway": {"host": "edge", "bridge": "br0"}}, "gateway": peer()});
    json!({
        "id": 7, "name": "web", "volumes": [1], "wires": [gateway],
        "boot_files": [{"name": "vmlinuz", "blake3": "00"}],
        "spec": {
            "memory": 135_274_496, "vcpus": 1, "max_vcpus": 4, "accel": "tcg", "cpu": "qemu64,+ssse3",
            "machine": "pc-q35-7.2", "disks": [{"volume": "root", "size": 67_108_864, "from": "x"}],
            "boot": {"kernel": {"kernel": "vmlinuz", "initrd": "initrd", "cmdline": "quiet"}},
            "nics": [{"mac": "52:54:00:00:00:01", "component": "lan", "ips": ["10.0.0.9"], "mtu": 1450}],
            "devices": ["edu"],
        },
    })
}

fn texts(values: Vec<Value>) -> Vec<Vec<u8>> {
    values.into_iter().map(|value| value.to_string().into_bytes()).collect()
}

/// A peer's questions and notes.
pub const NODE: Target = Target {
    name: "node-proto",
    corpus: || {
        let ticket = json!({"vm": 7, "lineage": 0, "generation": 2, "mv": 4});
        texts(vec![
            json!({"Stage": {"ticket": ticket, "definition": definition(), "source": peer(), "vcpus": 3}}),
            json!({"Repoint": {"wire": 3, "remote": "10.0.0.1", "lineage": 0, "generation": 2}}),
            json!({"ProbeWire": {"wire": 3, "mac": "52:54:00:00:00:01", "ips": ["10.0.0.2"], "within_ms": 10000}}),
            json!({"GreetWire": {"wire": 3, "nonce": vec![7; 16], "within_ms": 10000}}),
            json!({"Proved": {"ticket": ticket, "after_ms": 1.5}}),
            json!({"Resumed": {"ticket": ticket, "unix_us": 5, "ago_us": 6}}),
            json!({"HandOff": {"ticket": ticket, "body": "Pending"}}),
            json!({"Memory": {"ticket": ticket}}),
            json!({"Neighbours": {"ticket": ticket, "seed": u64::MAX, "most": 4096, "besides": [9]}}),
            json!({"Mirror": {"ticket": ticket, "volume": 1}}),
            json!({"Ok": null}),
        ])
    },
    run: |input| {
        understood_by_node(input);
    },
    bound: |length| MIB + 256 * length,
};

fn understood_by_node(input: &[u8]) -> bool {
    let understood = [
        again::<proto::Request>(input),
        again::<proto::Note>(input),
        again::<proto::Hello>(input),
        again::<proto::Answer>(input),
    ];
    if let Ok(proto::Request::Stage(stage)) = proto::decode(input) {
        let _ = godwit_node::spec::of(&stage.definition);
    }
    understood.contains(&true)
}

/// Bodies of the controller's and the nodes' APIs.
pub const API: Target = Target {
    name: "api",
    corpus: || {
        let spec = definition()["spec"].clone();
        texts(vec![
            definition(),
            json!({"definition": definition(), "disk": 5, "vcpus": 2}),
            json!({"name": "web", "at": "a", "spec": spec, "start": true}),
            spec,
            json!({"vm": "web", "to": "b", "disk": "mirror", "limit": 50_000_000, "vcpus": 2, "dry_run": false}),
            json!({"name": "a", "site": "s", "api": "10.0.0.1:7410"}),
            json!({"name": "lan", "kind": {"switch": {"bridge": "br0"}}}),
            json!({"name": "s"}),
            json!({"id": 4, "vm": 7, "to": peer(), "disk": "mirror", "limit": null, "vcpus": null}),
            json!({"bridge": "br0", "remote": "10.0.0.1", "vni": 3, "mtu": 1450, "lineage": 0, "generation": 2}),
            json!({"limit": 5}),
            json!({"force": true}),
        ])
    },
    run: |input| {
        understood_by_api(input);
    },
    bound: |length| MIB + 256 * length,
};

fn understood_by_api(input: &[u8]) -> bool {
    let understood = [
        again::<VmDefinition>(input),
        again::<VmSpec>(input),
        again::<CreateVm>(input),
        again::<StartMove>(input),
        again::<AddHost>(input),
        again::<Component>(input),
        again::<Site>(input),
        again::<MoveOrder>(input),
        again::<CheckVm>(input),
        again::<GatewayPort>(input),
        again::<SetLimit>(input),
        again::<StopVm>(input),
    ];
    if let Ok(definition) = serde_json::from_slice::<VmDefinition>(input) {
        let _ = godwit_node::spec::of(&definition);
    }
    understood.contains(&true)
}

/// The lab's scenario files.
pub const SCENARIO: Target = Target {
    name: "scenario",
    corpus: || {
        [
            include_str!("../../../scenarios/demo.toml"),
            include_str!("../../../scenarios/smoke.toml"),
            include_str!("../../../scenarios/gateway.toml"),
            include_str!("../../../scenarios/volumes.toml"),
            include_str!("../../../scenarios/crash.toml"),
        ]
        .map(|text| text.as_bytes().to_vec())
        .into()
    },
    run: |input| {
        if let Ok(text) = std::str::from_utf8(input)
            && let Ok(scenario) = godwit_lab::scenario::Scenario::parse(text, "a.toml")
        {
            let sites = scenario.site.iter().map(|site| site.name.get_ref());
            sites.clone().zip(sites.skip(1)).for_each(|(a, b)| {
                let _ = scenario.path_spec(a, b);
            });
            scenario.vm.iter().for_each(|vm| drop((vm.disks(), vm.data_set_mib(), vm.echoes().count())));
        }
    },
    bound: |length| 2 * MIB + 512 * length,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_of_the_corpus_is_understood_as_something() {
        for text in (NODE.corpus)() {
            assert!(understood_by_node(&text), "{}", String::from_utf8_lossy(&text));
        }
        for text in (API.corpus)() {
            assert!(understood_by_api(&text), "{}", String::from_utf8_lossy(&text));
        }
        for text in (SCENARIO.corpus)() {
            let text = String::from_utf8(text).expect("a scenario is a text");
            godwit_lab::scenario::Scenario::parse(&text, "a.toml").expect("the repository's scenarios are in order");
        }
    }
}
