//! A component's rules: `nft` reads them, inside.
//!
//! One transaction takes all rules away and puts the new ones in their place: there is no moment between. What is refused has
//! changed nothing, and says where, in lines of the user's file. Connections that are tracked stay tracked.

use crate::config::{Config, Rules};
use godwit_net::{NetError, NetNs};
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;

/// How long `nft` may take: milliseconds are usual, and a file's longest ruleset takes it under a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a firewall does whose file has no rules.
const CLOSED: &str = "table inet godwit { chain forward { type filter hook forward priority filter; policy drop; \
                      ct state established,related accept; }; }";
/// What a bridged one does: no frame passes, and the kernel needs nothing for it that it may lack.
const CLOSED_BRIDGED: &str =
    "table bridge godwit { chain forward { type filter hook forward priority filter; policy drop; }; }";

/// A rule for which the kernel loads connection tracking, and which goes again in the same transaction.
const TRACKING: &str = "table ip godwit-track { chain any { ct state new; }; }; delete table ip godwit-track\n";
/// Below `/proc/sys/net`: whether a segment in the middle of a connection begins one. It is there where connections are tracked.
pub(crate) const LOOSE: &str = "netfilter/nf_conntrack_tcp_loose";

/// Which chains at `forward` see what a component passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Hooks {
    /// Those of ip, ip6 and inet: it routes.
    Ip,
    /// Those of bridge: it bridges.
    Bridge,
    /// Those of all four: it bridges, and the kernel has `br_netfilter`.
    Both,
}

/// Why rules were not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RulesError {
    /// `nft` refused them.
    #[error("{0}")]
    Refused(String),
    /// They let through what they do not name.
    #[error(
        "line {0}: no chain drops what its rules do not accept: give a chain with `hook forward` the `policy drop`, in a table of the family inet, of ip and of ip6, or, if it is bridged, of bridge; or write `default = \"accept\"`"
    )]
    Open(usize),
    /// What they drop would pass.
    #[error(
        "line {0}: on this host no chain of the families ip, ip6 and inet sees bridged packets: load the kernel's module for that (`modprobe br_netfilter`), or write the chains in a table of the family bridge"
    )]
    Unseen(usize),
    /// There is no `nft`, or the namespace cannot be entered.
    #[error(transparent)]
    Net(#[from] NetError),
}

async fn nft(ns: &NetNs, arguments: &[&str], script: &str) -> Result<Result<Vec<u8>, String>, NetError> {
    let failed = |source| NetError::Kernel { operation: "run", object: "nft".into(), source };
    let runtime = tokio::runtime::Handle::current();
    let started = ns.within(|| {
        let _in = runtime.enter();
        let mut nft = Command::new("nft");
        nft.args(arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
        nft.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()
    })?;
    let mut child = started.map_err(failed)?;
    let input = child.stdin.take();
    let script = script.to_owned();
    let feed = async move {
        if let Some(mut input) = input {
            // It may have ended at an error before it has read all.
            let _ = input.write_all(script.as_bytes()).await;
        }
    };
    let both = async { tokio::join!(feed, child.wait_with_output()).1 };
    let output = timeout(PATIENCE, both).await.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
    if output.status.success() {
        return Ok(Ok(output.stdout));
    }
    Ok(Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// What `nft` says, in lines of the file that the rules stand in.
fn in_file(said: &str, before: usize) -> String {
    let shift = |line: &str| {
        let rest = line.strip_prefix("/dev/stdin:")?;
        let (number, rest) = rest.split_once(':')?;
        Some(format!("line {}, column {rest}", number.parse::<usize>().ok()? + before))
    };
    let lines: Vec<String> = said.lines().map(|line| shift(line).unwrap_or_else(|| line.to_owned())).collect();
    lines.join("\n")
}

/// Whether what nobody accepts is dropped, for IPv4 and IPv6, as `nft -j list chains` shows it.
fn drops(chains: &[u8], hooks: Hooks) -> bool {
    let all: Value = serde_json::from_slice(chains).unwrap_or_default();
    let closed = |family: &str| {
        all["nftables"].as_array().into_iter().flatten().any(|item| {
            let chain = &item["chain"];
            chain["family"] == family && chain["hook"] == "forward" && chain["policy"] == "drop"
        })
    };
    let ip = closed("inet") || (closed("ip") && closed("ip6"));
    match hooks {
        Hooks::Ip => ip,
        Hooks::Bridge => closed("bridge"),
        Hooks::Both => ip || closed("bridge"),
    }
}

/// Whether some chain waits, in a family of IP's, for what is passed on.
fn waits_for_ip(chains: &[u8]) -> bool {
    let all: Value = serde_json::from_slice(chains).unwrap_or_default();
    all["nftables"].as_array().into_iter().flatten().any(|item| {
        let is = |key: &str, values: [&str; 3]| values.iter().any(|value| item["chain"][key] == *value);
        is("family", ["ip", "ip6", "inet"]) && is("hook", ["prerouting", "forward", "postrouting"])
    })
}

/// Connections are tracked from now on, where a rule asks for that.
pub(crate) async fn track(ns: &NetNs) -> Result<(), NetError> {
    let there = || Path::new("/proc/sys/net").join(LOOSE).exists();
    if ns.within(there)? {
        return Ok(());
    }
    let said = nft(ns, &["-f", "/dev/stdin"], TRACKING).await?.err().unwrap_or_default();
    if ns.within(there)? {
        return Ok(());
    }
    let source = io::Error::other(format!("a firewall needs it: `modprobe nf_conntrack` on its host. {said}"));
    Err(NetError::Kernel { operation: "load kernel module", object: "nf_conntrack".into(), source })
}

/// By which it is told whether a namespace has these rules: kept in it, as long as it lasts.
pub(crate) fn mark(config: &Config, hooks: Hooks) -> String {
    let mut hasher = DefaultHasher::new();
    config.rules.as_ref().map(|rules| &rules.text).hash(&mut hasher);
    config.closed.hash(&mut hasher);
    hooks.hash(&mut hasher);
    format!("godwit rules {:016x}", hasher.finish())
}

/// Puts rules in the place of all that are there; none: a firewall's are closed, and any other component has none.
pub(crate) async fn load(ns: &NetNs, rules: Option<&Rules>, closed: bool, hooks: Hooks) -> Result<(), RulesError> {
    let text = match rules {
        Some(rules) => rules.text.as_str(),
        None if closed && hooks == Hooks::Ip => CLOSED,
        None if closed => CLOSED_BRIDGED,
        None => "",
    };
    // On one line with the first rule, so that lines stay what they are.
    let refused = match nft(ns, &["-f", "/dev/stdin"], &format!("flush ruleset; {text}\n")).await {
        // A component without rules needs no `nft`.
        Err(_) if text.is_empty() => return Ok(()),
        answer => answer?.err(),
    };
    let before = rules.map_or(0, |rules| rules.before);
    if let Some(said) = refused {
        return Err(RulesError::Refused(in_file(&said, before)));
    }
    let unseen = hooks == Hooks::Bridge && rules.is_some();
    if closed || unseen {
        let chains = nft(ns, &["-j", "list", "chains"], "").await?.map_err(RulesError::Refused)?;
        if unseen && waits_for_ip(&chains) {
            return Err(RulesError::Unseen(before + 1));
        }
        if closed && !drops(&chains, hooks) {
            return Err(RulesError::Open(before + 1));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nft_says_is_said_in_lines_of_the_file() {
        let said = "/dev/stdin:2:21-21: Error: syntax error, unexpected newline\n tcp dport 80 accpet\n     ^";
        let shown = in_file(said, 10);
        assert!(shown.starts_with("line 12, column 21-21: Error"), "{shown}");
        assert_eq!(shown.lines().count(), 3);
    }

    #[test]
    fn a_ruleset_is_closed_for_both_families_or_it_is_not() {
        let chain = |family: &str, policy: &str| serde_json::json!({"chain": {"family": family, "hook": "forward", "policy": policy}});
        let all = |chains: &[Value]| serde_json::to_vec(&serde_json::json!({ "nftables": chains })).unwrap();
        for hooks in [Hooks::Ip, Hooks::Both] {
            assert!(drops(&all(&[chain("inet", "drop")]), hooks));
            assert!(drops(&all(&[chain("ip", "drop"), chain("ip6", "drop")]), hooks));
        }
        for hooks in [Hooks::Ip, Hooks::Bridge, Hooks::Both] {
            for open in [vec![], vec![chain("inet", "accept")], vec![chain("ip", "drop")]] {
                assert!(!drops(&all(&open), hooks), "{hooks:?} {open:?}");
            }
        }
    }

    #[test]
    fn a_bridged_ruleset_is_closed_only_by_chains_that_see_what_is_bridged() {
        let chain = |family: &str, hook: &str| {
            let chain = serde_json::json!({"family": family, "hook": hook, "policy": "drop"});
            serde_json::to_vec(&serde_json::json!({ "nftables": [{ "chain": chain }] })).unwrap()
        };
        let (inet, bridge) = (chain("inet", "forward"), chain("bridge", "forward"));
        assert!(!drops(&inet, Hooks::Bridge) && drops(&bridge, Hooks::Bridge) && drops(&bridge, Hooks::Both));
        assert!(!drops(&bridge, Hooks::Ip), "what is routed passes no chain of a bridge");
        assert!(waits_for_ip(&inet) && waits_for_ip(&chain("ip6", "prerouting")));
        assert!(!waits_for_ip(&bridge) && !waits_for_ip(&chain("inet", "input")));
    }
}
