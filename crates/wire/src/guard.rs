//! Who may put frames into a wire.
//!
//! The kernel's VXLAN takes a frame from any host that knows the number: 24 bits are no secret, and an isolated source
//! knows them anyway. So each end of a wire has a chain of nftables in the host's input: of the tunnel's packets with its
//! number those from the wire's other end pass, and all others are dropped. It looks at packets after their fragments were
//! put together, and at the outer header wherever that ends.
//!
//! The rules are written by `nft`, in one transaction each; every statement may be repeated. What can go wrong: `nft`
//! is not installed, or the kernel has no nftables. Then the wire works and anyone on the underlay may speak on it,
//! which is logged. Where `nft` fails otherwise, what it wrote before holds, and keeps the wire's new host out: that is an error, and to be
//! repeated. A host whose firewall is loaded anew with `flush ruleset` has lost these rules until its wires are
//! pointed or made again. A sender that forges its address is not kept out by this: filter the underlay's edge.

use crate::Vni;
use godwit_net::NetError;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// How long `nft` may take: it takes some milliseconds, and longer only where many write rules at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// The rules of one installation, in a table of its own.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    table: String,
}

/// Who may send by a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed<'a> {
    /// The number.
    pub vni: Vni,
    /// The tunnels' UDP port.
    pub port: u16,
    /// This host.
    pub local: IpAddr,
    /// Only they; nobody, without any.
    pub remotes: &'a [IpAddr],
}

impl Allowed<'_> {
    /// The number's own part of the rules in the table `t`.
    fn rules(&self, t: &str) -> String {
        let (n, port, local) = (self.vni.0, self.port, self.local);
        let family = |ip: IpAddr| if ip.is_ipv4() { "ip" } else { "ip6" };
        let pass = self.remotes.iter().map(|remote| {
            let (f, l) = (family(*remote), family(local));
            format!("add rule {t} w{n} {f} saddr {remote} {l} daddr {local} return\n")
        });
        let pass: String = pass.collect();
        format!(
            "add element {t} ports {{ {port} }}\n\
             add chain {t} w{n}\n\
             flush chain {t} w{n}\n\
             {pass}\
             add rule {t} w{n} counter drop\n\
             add element {t} wires {{ {n} : jump w{n} }}\n"
        )
    }
}

impl Guard {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { table: format!("inet {prefix}-wires") }
    }

    /// From now on this is who may send: all of it, or nothing has changed.
    ///
    /// # Errors
    /// What was written before for one of these numbers holds, or may: to be repeated. Where nothing was, and `nft` cannot, any host may
    /// send, which is logged.
    pub(crate) async fn only(&self, allowed: &[Allowed<'_>]) -> Result<(), NetError> {
        if allowed.is_empty() {
            return Ok(());
        }
        let Err(why) = listed(&self.script(allowed)).await else { return Ok(()) };
        let numbers: Vec<u32> = allowed.iter().map(|a| a.vni.0).collect();
        let holds = match &why {
            Trouble::Silent => true,
            Trouble::Unable(_) => match listed(&self.list()).await {
                Ok(table) => chains(&table).iter().any(|number| numbers.contains(number)),
                Err(Trouble::Silent) => true,
                Err(Trouble::Unable(_)) => false,
            },
        };
        if holds {
            let (operation, object) = ("have nftables say who may send by the numbers", format!("{numbers:?}"));
            return Err(NetError::Kernel { operation, object, source: io::Error::other(why.to_string()) });
        }
        tracing::warn!(vni = ?numbers, %why, "any host may send into this wire: install nftables, or filter the underlay");
        Ok(())
    }

    fn list(&self) -> String {
        format!("list table {}", self.table)
    }

    /// One transaction.
    fn script(&self, allowed: &[Allowed<'_>]) -> String {
        let t = &self.table;
        let mut script = format!(
            "add table {t}\n\
             add set {t} ports {{ type inet_service ; }}\n\
             add map {t} wires {{ typeof @th,96,24 : verdict ; }}\n\
             add chain {t} input {{ type filter hook input priority filter ; policy accept ; }}\n\
             flush chain {t} input\n\
             add rule {t} input udp dport @ports @th,96,24 vmap @wires\n"
        );
        script.extend(allowed.iter().map(|allowed| allowed.rules(t)));
        script
    }

    /// The numbers that there are rules for. Without `nft` there are none.
    pub(crate) async fn numbers(&self) -> Vec<u32> {
        let listed = listed(&self.list()).await.unwrap_or_default();
        chains(&listed)
    }

    /// The number is not in use here any more. Without rules there is nothing to do.
    pub(crate) async fn forget(&self, vni: Vni) {
        let (t, n) = (&self.table, vni.0);
        // Not an error, not even in the log: rules of a tunnel that is gone let nothing in.
        let (element, chain) = (format!("delete element {t} wires {{ {n} }}\n"), format!("delete chain {t} w{n}\n"));
        if run(&format!("{element}{chain}")).await.is_err() {
            // A transaction happens as a whole, or not at all: one of the two may be gone already.
            let _ = run(&element).await;
            let _ = run(&chain).await;
        }
    }

    /// No rule is left.
    pub(crate) async fn tidy(&self) {
        let _ = run(&format!("delete table {}\n", self.table)).await;
    }
}

/// The numbers of the wires' chains in a table as `nft` prints it.
fn chains(table: &str) -> Vec<u32> {
    let names = table.lines().filter_map(|line| line.trim().strip_prefix("chain w")?.strip_suffix(" {"));
    names.filter_map(|number| number.parse().ok()).collect()
}

/// Why `nft` has not done as it was told.
enum Trouble {
    /// It is not there, or says so: nothing has changed.
    Unable(String),
    /// It says nothing: nobody knows what has.
    Silent,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unable(why) => f.write_str(why),
            Self::Silent => write!(f, "nft did not end within {PATIENCE:?}"),
        }
    }
}

/// What `nft` answers, or in words why it has not done as it was told.
pub(crate) async fn run(script: &str) -> Result<String, String> {
    listed(script).await.map_err(|why| why.to_string())
}

/// What `nft` answers, in the network namespace of the thread that calls, as everything here.
async fn listed(script: &str) -> Result<String, Trouble> {
    let mut nft = Command::new("nft");
    nft.arg(script).stdin(Stdio::null()).kill_on_drop(true);
    match timeout(PATIENCE, nft.output()).await {
        Err(_) => Err(Trouble::Silent),
        Ok(Err(error)) => Err(Trouble::Unable(format!("nft: {error}"))),
        Ok(Ok(output)) if !output.status.success() => {
            Err(Trouble::Unable(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
        Ok(Ok(output)) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_wires_rules_are_one_transaction_each_with_its_own_hosts() {
        let (a, b) = ([IpAddr::from([10, 0, 0, 1])], [IpAddr::from([10, 0, 0, 2]), IpAddr::from([10, 0, 0, 3])]);
        let local = IpAddr::from([10, 0, 0, 9]);
        let of = |vni, remotes| Allowed { vni: Vni(vni), port: 4789, local, remotes };
        let script = Guard::new("gw").script(&[of(5, &a), of(6, &b)]);
        assert_eq!(script.matches("flush chain inet gw-wires input\n").count(), 1, "{script}");
        let senders = |vni: u32| {
            let rule = format!("add rule inet gw-wires w{vni} ip saddr ");
            let lines = script.lines().filter_map(|line| line.strip_prefix(&rule));
            lines.map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!((senders(5), senders(6)), (vec!["10.0.0.1".into()], vec!["10.0.0.2".into(), "10.0.0.3".into()]));
        for vni in [5, 6] {
            let at = |text: String| script.find(&text).unwrap_or_else(|| panic!("no `{text}` in {script}"));
            let dropped = at(format!("add rule inet gw-wires w{vni} counter drop\n"));
            assert!(at(format!("flush chain inet gw-wires w{vni}\n")) < dropped, "{script}");
            assert!(dropped < at(format!("wires {{ {vni} : jump w{vni} }}\n")), "{script}");
        }
    }

    #[test]
    fn the_numbers_are_read_from_what_nft_prints_and_from_nothing_else() {
        let table = "table inet gw-wires {\n\tset ports {\n\t}\n\tchain input {\n\t\t@th,96,24 vmap @wires\n\t}\n\n\
                     \tchain w12 {\n\t\tcounter packets 0 bytes 0 drop\n\t}\n\n\tchain w7 {\n\t}\n\tchain wx {\n\t}\n}\n";
        assert_eq!(chains(table), [12, 7]);
        assert_eq!(chains(""), [0; 0]);
    }
}
