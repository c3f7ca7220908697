//! `godwit volume verify`: asks for one slice after the other, and adds up.

use crate::failure::{Code, Failure};
use crate::quantity::size;
use crate::table::printable;
use clap::Args;
use godwit_api::verify::{CopyState, Rot, ToldBy, Verified, VerifyVolume};
use godwit_api::{Name, PublicClient};
use godwit_units::Bytes;
use std::io::IsTerminal;

#[derive(Debug, Args)]
#[command(
    after_help = "Only digests travel, and only blocks count whose stamps say that they are equal: what differs otherwise lags\nbehind, and comes. A rotten copy is told from a right one by a digest that was written down when all agreed\n(each verification does that), by the disk's own error, or by a majority of at least two. Where nothing tells,\nnothing is repaired unless `--from` names the replica to be believed.\n\nIt fails (exit code 1) where rot was found that is not repaired, or where nothing could be compared, as after a\npromotion until a pre-cache or a move has brought the others up to date. It may be interrupted, and begun again."
)]
pub struct VerifyArgs {
    /// The volume, by name
    pub volume: Name,
    /// Compare with the replica at this site, or on this host, only
    #[arg(long)]
    pub site: Option<Name>,
    /// Overwrite what is rotten with what is right
    #[arg(long)]
    pub repair: bool,
    /// Where nothing tells which replica is right, believe the one at this site or on this host
    #[arg(long, value_name = "SITE", requires = "repair")]
    pub from: Option<Name>,
    /// Read at most so much of each disk in a second
    #[arg(long, value_name = "SIZE", default_value = "32M", value_parser = size)]
    pub rate: Bytes,
}

/// Verifies all of a volume; what was found.
pub async fn run(api: &PublicClient, args: &VerifyArgs) -> Result<Verified, Failure> {
    let mut wanted = VerifyVolume {
        from: 0,
        site: args.site.clone(),
        repair: args.repair,
        believe: args.from.clone(),
        rate: args.rate,
    };
    let mut all = Verified::default();
    let shows = std::io::stderr().is_terminal();
    loop {
        let slice = api.verify(&args.volume, &wanted).await?;
        add(&mut all, slice);
        if shows {
            let seen = Bytes(all.alike.0 + all.behind.0 + all.unsettled.0);
            eprint!("\r{seen} verified, {} found   ", all.findings.len());
        }
        match all.next.take().filter(|next| *next > wanted.from) {
            Some(next) => wanted.from = next,
            None => break,
        }
    }
    if shows {
        eprintln!();
    }
    Ok(all)
}

fn add(all: &mut Verified, slice: Verified) {
    all.alike.0 += slice.alike.0;
    all.behind.0 += slice.behind.0;
    all.unsettled.0 += slice.unsettled.0;
    all.findings.extend(slice.findings);
    all.next = slice.next;
    for holder in slice.holders {
        match all.holders.iter_mut().find(|h| h.host == holder.host) {
            // Left out once is not compared.
            Some(known) => known.error = known.error.take().or(holder.error),
            None => all.holders.push(holder),
        }
    }
}

/// Whether all is well: an error where it is not.
pub fn verdict(found: &Verified) -> Result<(), Failure> {
    let left: u64 = found.findings.iter().filter(|f| !f.repaired).map(|f| f.blocks).sum();
    if left > 0 {
        return Err(Failure::new(Code::Failed, format!("{left} blocks are rotten, and not repaired")));
    }
    match found.holders.iter().filter(|h| h.error.is_none()).count() {
        0 | 1 => Err(Failure::new(Code::Failed, "there was no other replica to compare with")),
        _ if compared_nothing(found) => Err(Failure::new(
            Code::Failed,
            "nothing could be compared, so nothing is known of what is written; verify again when a pre-cache or a move has brought the other replicas up to date",
        )),
        _ => Ok(()),
    }
}

/// Whether something is written, and none of it was compared with anything.
fn compared_nothing(found: &Verified) -> bool {
    let Verified { alike, behind, unsettled, findings, .. } = found;
    alike.0 == 0 && findings.is_empty() && behind.0 + unsettled.0 > 0
}

/// For people.
pub fn show(volume: &Name, found: &Verified) -> String {
    let names: Vec<String> = found.holders.iter().filter(|h| h.error.is_none()).map(|h| h.host.to_string()).collect();
    let mut out = format!("{volume} at {}: {} alike", names.join(", "), found.alike);
    if found.behind.0 > 0 {
        out += &format!(", {} only at one of them", found.behind);
    }
    if found.unsettled.0 > 0 {
        out += &format!(", {} written too late to be compared", found.unsettled);
    }
    out.push('\n');
    for holder in &found.holders {
        if let Some(error) = &holder.error {
            out += &format!("{} was left out: {}\n", holder.host, printable(error));
        }
    }
    for rot in &found.findings {
        out += &rotten(volume, rot);
    }
    out
}

fn rotten(volume: &Name, rot: &Rot) -> String {
    let (first, last) = (rot.block, rot.block + rot.blocks - 1);
    let copies: Vec<String> = rot
        .copies
        .iter()
        .filter(|copy| copy.state != CopyState::Other)
        .map(|copy| format!("{} {}", copy.host, copy.state.as_str()))
        .collect();
    let told = match rot.told_by {
        ToldBy::Record => "by the digest of when all agreed",
        ToldBy::Readable => "by what can be read",
        ToldBy::Majority => "by the majority",
        ToldBy::Nothing => "nothing tells which is right",
    };
    let end = match (&rot.error, rot.repaired) {
        (_, true) => "; repaired".to_owned(),
        (Some(error), _) => format!("; not repaired: {}", printable(error)),
        (None, _) => String::new(),
    };
    format!("ROT {volume} blocks {first}-{last} (4096 bytes each): {} ({told}){end}\n", copies.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::verify::{HeldCopy, VerifiedHolder};

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn rot(repaired: bool) -> Rot {
        let copy = |host: &str, state| HeldCopy { host: name(host), state };
        let copies = vec![copy("a1", CopyState::Right), copy("b1", CopyState::Rotten)];
        Rot { block: 7, blocks: 2, copies, told_by: ToldBy::Record, repaired, error: None }
    }

    #[test]
    fn what_is_rotten_is_named_and_the_command_fails_until_it_is_repaired() {
        let holder =
            |host: &str, error: Option<&str>| VerifiedHolder { host: name(host), error: error.map(Into::into) };
        let slice = |repaired| Verified {
            next: None,
            holders: vec![holder("a1", None), holder("b1", None)],
            alike: Bytes(4096),
            findings: vec![rot(repaired)],
            ..Verified::default()
        };
        let mut all = Verified::default();
        add(&mut all, slice(true));
        assert!(verdict(&all).is_ok());
        add(&mut all, slice(false));
        assert!(verdict(&all).is_err());
        let text = show(&name("root"), &all);
        assert!(text.contains("root at a1, b1: 8.0 KiB alike"), "{text}");
        assert!(
            text.contains("blocks 7-8") && text.contains("a1 right, b1 rotten") && text.contains("repaired"),
            "{text}"
        );
        // One replica that is compared with nothing proves nothing.
        let mut alone = Verified::default();
        add(
            &mut alone,
            Verified { holders: vec![holder("a1", None), holder("b1", Some("away"))], ..Verified::default() },
        );
        assert!(verdict(&alone).is_err());
    }

    #[test]
    fn a_verification_that_could_compare_nothing_of_what_is_written_says_so_and_fails() {
        let holder = |host: &str| VerifiedHolder { host: name(host), error: None };
        let of = |alike, behind, unsettled| Verified {
            holders: vec![holder("a1"), holder("b1")],
            alike: Bytes(alike),
            behind: Bytes(behind),
            unsettled: Bytes(unsettled),
            ..Verified::default()
        };
        for nothing in [of(0, 0, 4096), of(0, 4096, 0)] {
            let failure = verdict(&nothing).unwrap_err();
            assert!(failure.code == Code::Failed && failure.message.contains("nothing could be compared"), "{failure}");
        }
        assert!(show(&name("root"), &of(0, 0, 4096)).contains("0 B alike, 4.0 KiB written too late to be compared"));
        // Some of it was; all that there is was rotten, and is repaired; or nothing is written.
        let repaired = Verified { findings: vec![rot(true)], ..of(0, 4096, 4096) };
        for well in [of(4096, 8192, 8192), repaired, of(0, 0, 0)] {
            assert!(verdict(&well).is_ok(), "{well:?}");
        }
    }
}
