//! What all hosts find wrong with their parts of the network, and what of wires does not fit together between them: a host that has missed
//! something is in order with itself.

use crate::state::Controller;
use axum::Json;
use axum::extract::State;
use futures_util::future::{join, join_all};
use godwit_api::network::{HostFinding, NetFinding, NetKind};
use godwit_api::wire::LocalWire;
use godwit_api::{ApiError, HostClient, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Between two looks at what hosts know: longer than they take to tell each other of a move.
const AGAIN: Duration = Duration::from_millis(500);

/// What a host knows of wires.
#[derive(Clone, Debug)]
struct Word {
    /// Where frames for it go.
    underlay: IpAddr,
    wires: Vec<LocalWire>,
}

pub async fn list(State(c): State<Arc<Controller>>) -> Result<Json<Vec<HostFinding>>, ApiError> {
    let nodes: Vec<(Name, HostClient)> = c.hosts()?.iter().map(|host| (host.name.clone(), c.node(host))).collect();
    let own = join_all(nodes.iter().map(|(host, node)| own(host, node)));
    let (own, between) = join(own, between(&nodes)).await;
    Ok(Json(own.into_iter().flatten().chain(between).collect()))
}

/// What a host finds with itself.
async fn own(host: &Name, node: &HostClient) -> Vec<HostFinding> {
    let findings = node.network().await.unwrap_or_else(|error| {
        let message = format!("it cannot be asked: {}", error.message);
        vec![NetFinding { kind: NetKind::Host, message }]
    });
    findings.into_iter().map(|finding| HostFinding { host: host.clone(), finding }).collect()
}

/// What does not fit together, and stays so: a move changes all of it while it is looked at.
async fn between(nodes: &[(Name, HostClient)]) -> Vec<HostFinding> {
    let hosts: BTreeSet<&Name> = nodes.iter().map(|(host, _)| host).collect();
    let mut found = judge(&words(nodes).await, &hosts);
    if !found.is_empty() {
        tokio::time::sleep(AGAIN).await;
        let again = judge(&words(nodes).await, &hosts);
        found.retain(|finding| again.contains(finding));
    }
    found
}

/// What each host knows that answers; those that do not are found by [`own`].
async fn words(nodes: &[(Name, HostClient)]) -> BTreeMap<Name, Word> {
    let asked = nodes.iter().map(|(host, node)| async move {
        let (facts, wires) = join(node.facts(), node.wires()).await;
        Some((host.clone(), Word { underlay: facts.ok()?.underlay, wires: wires.ok()? }))
    });
    join_all(asked).await.into_iter().flatten().collect()
}

/// What does not fit together of what hosts know, where these are all hosts that there are.
fn judge(words: &BTreeMap<Name, Word>, hosts: &BTreeSet<&Name>) -> Vec<HostFinding> {
    let mut open: BTreeMap<(u32, u32), Vec<&Name>> = BTreeMap::new();
    for (host, word) in words {
        for wire in &word.wires {
            for endpoint in &wire.open {
                open.entry((wire.wire.id, *endpoint)).or_default().push(host);
            }
        }
    }
    let at = |wire: u32, endpoint: u32| open.get(&(wire, endpoint)).map_or(&[][..], Vec::as_slice);
    let mut found = vec![];
    let mut add = |host: &Name, message: String| {
        found.push(HostFinding { host: host.clone(), finding: NetFinding { kind: NetKind::Wire, message } });
    };
    for (host, word) in words {
        for local in word.wires.iter().filter(|local| !local.open.is_empty()) {
            let wire = &local.wire;
            let [a, b] = &wire.ends;
            let named = format!("wire {} from {} to {}", wire.id, a.name, b.name);
            for end in &wire.ends {
                match at(wire.id, end.endpoint) {
                    // Said once, of the first.
                    [first, second, ..] if *first == host => {
                        let message = format!("{named}: {} is open here and on `{second}`", end.name);
                        add(host, format!("{message}; restart the node of whichever does not own it"));
                    }
                    [there] if *there != host => {
                        let to = words[*there].underlay;
                        if !local.remotes.contains(&to) {
                            let message = format!(
                                "{named}: {} is on `{there}`, and its frames are not sent there, {to}",
                                end.name
                            );
                            add(host, format!("{message}; see that the two hosts' links reach each other"));
                        }
                    }
                    _ => {}
                }
            }
            // One that is none any more is not waited for once the controller's next word has come.
            for other in local.untold.iter().filter(|other| hosts.contains(other)) {
                let message = format!("{named}: `{other}` has not answered yet that it knows where its ends are");
                add(host, format!("{message}; see that the two hosts' links reach each other"));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A wire from endpoint 3 at a to endpoint 4 at b, as these hosts know it: which ends are open there, where frames go, and who has not
    /// answered.
    fn after(change: impl FnOnce(&mut BTreeMap<Name, Word>)) -> Vec<String> {
        let host = |n: u8| {
            json!({"name": "x", "underlay": format!("10.0.0.{n}"), "link":
            {"control": "10.0.0.1:1", "disk": "10.0.0.1:2", "memory": "10.0.0.1:3"}})
        };
        let end = |endpoint: u32, name: &str| -> Value {
            json!({"endpoint": endpoint, "name": name, "view": {"host": host(9), "lineage": 0, "generation": 1}})
        };
        let wire = json!({"id": 7, "vni": 7, "mtu": 1500, "ends": [end(3, "web:eth0"), end(4, "db:eth0")]});
        let word = |n: u8, open: &[u32], remotes: &[&str]| Word {
            underlay: [10, 0, 0, n].into(),
            wires: vec![serde_json::from_value(json!({"wire": wire, "open": open, "remotes": remotes})).unwrap()],
        };
        let mut words: BTreeMap<Name, Word> = [
            ("a", word(1, &[3], &["10.0.0.2"])),
            ("b", word(2, &[4], &["10.0.0.1"])),
            // Where an end was once.
            ("c", word(3, &[], &[])),
        ]
        .map(|(name, word)| (name.parse().unwrap(), word))
        .into();
        let hosts = ["a", "b", "c"].map(|host| host.parse::<Name>().unwrap());
        change(&mut words);
        judge(&words, &hosts.iter().collect())
            .into_iter()
            .map(|found| format!("{}: {}", found.host, found.finding.message))
            .collect()
    }

    fn of<'a>(words: &'a mut BTreeMap<Name, Word>, host: &str) -> &'a mut LocalWire {
        &mut words.get_mut(&host.parse::<Name>().unwrap()).unwrap().wires[0]
    }

    #[test]
    fn nothing_is_found_where_hosts_agree_or_an_end_is_open_nowhere() {
        assert_eq!(after(|_| ()), Vec::<String>::new());
        assert_eq!(after(|words| of(words, "b").open.clear()), Vec::<String>::new());
        // Both ends meet.
        let meet = |words: &mut BTreeMap<Name, Word>| {
            of(words, "b").open.clear();
            (of(words, "a").open, of(words, "a").remotes) = (vec![3, 4], vec![]);
        };
        assert_eq!(after(meet), Vec::<String>::new());
        assert_eq!(
            after(|words| drop(words.remove(&"b".parse::<Name>().unwrap()))),
            Vec::<String>::new(),
            "it is silent"
        );
    }

    #[test]
    fn what_a_host_has_missed_is_found_on_it() {
        let stale = after(|words| of(words, "a").remotes = vec![[10, 0, 0, 3].into()]);
        assert!(stale.len() == 1 && stale[0].starts_with("a: wire 7") && stale[0].contains("10.0.0.2"), "{stale:?}");
        let twice = after(|words| of(words, "c").open = vec![3]);
        assert!(twice.iter().any(|said| said.starts_with("a: ") && said.contains("on `c`")), "{twice:?}");
        let untold = after(|words| of(words, "b").untold = vec!["c".parse().unwrap()]);
        assert!(untold.len() == 1 && untold[0].starts_with("b: ") && untold[0].contains("`c`"), "{untold:?}");
        let gone = after(|words| of(words, "b").untold = vec!["removed".parse().unwrap()]);
        assert_eq!(gone, Vec::<String>::new(), "nobody can do anything about it");
    }
}
