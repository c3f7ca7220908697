//! What a carrier lets in and passes on: frames of wires between the hosts that it was told of, and nothing else.
//!
//! Rules are `nft`'s, in a table of their own, replaced in one transaction. Packets that others of the site send to hosts of other sites are
//! marked before they are routed, fragments with them, and the mark leads to the table of tunnels. An interface that passes nothing on by
//! itself, and does so for an extender's sake, passes on nothing but this.
//!
//! Whoever loads a firewall anew with `flush ruleset` takes these rules away. The table of tunnels leads what comes in by such an interface
//! into a tunnel or nowhere without them as well ([`super::Paths::closed`]); of one that passed other things on before, only the mark
//! keeps frames from going in clear. So what is in force is to be looked at again ([`in_force`]).

use super::PREFIX;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// The mark of packets that others have given to this host to be carried.
pub const CARRIED: u32 = 0x6777;
const TABLE: &str = "inet godwit-extenders";

/// What a carrier passes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passing {
    /// Hosts of other sites.
    pub beyond: BTreeSet<Ipv4Addr>,
    /// Hosts of this one.
    pub mates: BTreeSet<Ipv4Addr>,
    /// UDP port of wires.
    pub port: u16,
    /// Interfaces that would pass nothing on without an extender.
    pub closed: BTreeSet<String>,
}

fn set(hosts: &BTreeSet<Ipv4Addr>) -> String {
    let list: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let elements = if list.is_empty() { String::new() } else { format!("elements = {{ {} }}; ", list.join(", ")) };
    format!("{{ type ipv4_addr; {elements}}}")
}

/// The rules, for `nft`.
#[must_use]
pub fn script(passing: &Passing) -> String {
    let Passing { beyond, mates, port, closed } = passing;
    let (beyond, mates) = (set(beyond), set(mates));
    let gx = format!("\"{PREFIX}*\"");
    let out = "ip saddr @mates ip daddr @beyond";
    let back = "ip saddr @beyond ip daddr @mates";
    let rest = "ip frag-off & 0x1fff != 0";
    let errors = "icmp type { destination-unreachable, time-exceeded }";
    let closed: String = closed.iter().map(|name| format!("iifname \"{name}\" drop\n")).collect();
    format!(
        "add table {TABLE}\n\
         delete table {TABLE}\n\
         table {TABLE} {{\n\
         set beyond {beyond}\n\
         set mates {mates}\n\
         chain taken {{\n\
         type filter hook prerouting priority mangle; policy accept;\n\
         iifname {gx} return\n\
         {out} udp dport {port} meta mark set {CARRIED}\n\
         {out} {rest} meta mark set {CARRIED}\n\
         }}\n\
         chain input {{\n\
         type filter hook input priority filter - 10; policy accept;\n\
         iifname {gx} ip saddr @beyond udp dport {port} accept\n\
         iifname {gx} icmp type {{ echo-request, echo-reply, destination-unreachable, time-exceeded }} accept\n\
         iifname {gx} drop\n\
         }}\n\
         chain forward {{\n\
         type filter hook forward priority filter - 10; policy accept;\n\
         iifname {gx} {back} udp dport {port} accept\n\
         iifname {gx} {back} {rest} accept\n\
         iifname {gx} ip daddr @mates {errors} accept\n\
         iifname {gx} drop\n\
         oifname {gx} {out} udp dport {port} accept\n\
         oifname {gx} {out} {rest} accept\n\
         oifname {gx} ip daddr @beyond {errors} accept\n\
         oifname {gx} drop\n\
         {closed}\
         }}\n\
         }}\n"
    )
}

/// Rules as `nft` prints them, to be compared: the words, in an order of their own, since it prints a set's hosts in any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InForce(Vec<String>);

impl InForce {
    fn read(printed: &str) -> Self {
        let words = printed.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
        let mut words: Vec<String> = words.map(ToOwned::to_owned).collect();
        words.sort_unstable();
        Self(words)
    }
}

/// Puts the rules into force; as they are seen then.
///
/// # Errors
/// `nft`'s words. Without rules nothing may be passed on.
pub async fn enforce(passing: &Passing) -> Result<InForce, String> {
    crate::guard::run(&script(passing)).await?;
    in_force().await
}

/// The rules that are in force, as they are seen now.
///
/// # Errors
/// `nft`'s words: there are none.
pub async fn in_force() -> Result<InForce, String> {
    Ok(InForce::read(&crate::guard::run(&format!("list table {TABLE}")).await?))
}

/// No rule is left.
pub async fn lift() {
    let _ = crate::guard::run(&format!("delete table {TABLE}\n")).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_the_same_in_whatever_order_hosts_are_printed_and_others_without_a_word_of_them() {
        let printed = "table inet godwit-extenders {\n\tset mates {\n\t\ttype ipv4_addr\n\t\telements = { 10.0.0.1, 10.0.0.2,\n\
                       \t\t\t     10.0.0.3 }\n\t}\n\tchain input {\n\t\tiifname \"gx*\" drop\n\t}\n}\n";
        let other = printed.replace("10.0.0.1, 10.0.0.2,", "10.0.0.2,10.0.0.1,");
        assert_eq!(InForce::read(printed), InForce::read(&other));
        for gone in ["10.0.0.3 ", "\t\tiifname \"gx*\" drop\n"] {
            assert_ne!(InForce::read(printed), InForce::read(&printed.replace(gone, "")), "{gone}");
        }
    }
}
