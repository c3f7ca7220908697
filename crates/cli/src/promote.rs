//! `godwit volume promote`: says from what a VM would be started, then has it started.

use crate::failure::Failure;
use clap::Args;
use godwit_api::promote::{PromoteVolume, Promoted};
use godwit_api::{Name, PublicClient};

#[derive(Debug, Args)]
#[command(
    after_help = "The VM's host must not answer, neither the controller nor the host that has the images, and somebody has to say\nhow it is kept from running the VM. Each of the VM's disks needs an image there: `godwit volume precache\n--consistent` keeps one. Images of several disks are of one moment where all of them are pre-cached so, and\nwhether they are is said before and afterwards, as is how far they are apart where not: as if their power had\ngone at different times. What was written after an image's epoch is lost; how long ago that was is said, too.\nA new lineage begins: a host that comes back is paused, and what it has is kept until somebody removes it\n(`godwit orphan ls`)."
)]
pub struct PromoteArgs {
    /// A volume of the VM, by name
    pub volume: Name,
    /// The site, or the host, that has the images
    #[arg(long)]
    pub site: Name,
    /// How the VM's host is kept from running it, and who says so
    #[arg(long, value_name = "TEXT", required_unless_present = "dry_run")]
    pub fenced: Option<String>,
    /// A host that an earlier promotion was ordered to, or that the VM was being moved to, and that does not answer: it is kept from running the VM as well, as --fenced says
    #[arg(long, value_name = "HOST")]
    pub also_fenced: Vec<Name>,
    /// Only say from what it would be started, and what is in the way
    #[arg(long)]
    pub dry_run: bool,
}

/// Promotes; says the recovery point before, and answers with it.
pub async fn run(api: &PublicClient, args: &PromoteArgs) -> Result<Promoted, Failure> {
    let mut how = PromoteVolume {
        site: args.site.clone(),
        fenced: args.fenced.clone().unwrap_or_default(),
        also_fenced: args.also_fenced.clone(),
        dry_run: true,
    };
    let before = api.promote(&args.volume, &how).await?;
    if args.dry_run {
        return Ok(before);
    }
    eprint!("{}", show(&before));
    how.dry_run = false;
    Ok(api.promote(&args.volume, &how).await?)
}

/// For people.
pub fn show(promoted: &Promoted) -> String {
    let Promoted { vm, host, lost, lineage, disks, one_moment, dry_run } = promoted;
    let verb = if *dry_run { "would be" } else { "is" };
    let mut out = format!("`{vm}` {verb} started at `{host}` in lineage {}, without `{lost}`, from\n", lineage.0);
    for disk in disks {
        out +=
            &format!("  {} as of epoch {}, {:.1} s ago; later writes are lost\n", disk.volume, disk.epoch, disk.age_s);
    }
    let (first, last) = (disks.iter().map(|d| d.epoch_unix_ms).min(), disks.iter().map(|d| d.epoch_unix_ms).max());
    if let (Some(first), Some(last), 2..) = (first, last, disks.len()) {
        let apart = (last - first) as f64 / 1000.0;
        out += &match one_moment {
            true => "  they are of one moment, as one loss of power would have left them\n".to_owned(),
            false => format!("  they are {apart:.1} s apart, as disks whose power went at different times\n"),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::promote::RecoveryPoint;
    use godwit_units::Lineage;

    #[test]
    fn the_recovery_point_is_said_and_how_far_disks_are_apart() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        let disk = |volume: &str, at: u64| RecoveryPoint {
            volume: name(volume),
            epoch: "1.17".into(),
            epoch_unix_ms: at,
            age_s: 12.34,
        };
        let mut told = Promoted {
            vm: name("web"),
            host: name("b1"),
            lost: name("a1"),
            lineage: Lineage(1),
            disks: vec![disk("root", 1000), disk("data", 3500)],
            one_moment: false,
            dry_run: true,
        };
        let text = show(&told);
        assert!(text.contains("`web` would be started at `b1` in lineage 1, without `a1`"), "{text}");
        assert!(text.contains("root as of epoch 1.17, 12.3 s ago"), "{text}");
        assert!(text.contains("2.5 s apart"), "{text}");
        told.disks[1].epoch_unix_ms = 1000;
        assert!(show(&told).contains("0.0 s apart"), "one clock's millisecond is not one moment of both");
        told.one_moment = true;
        let text = show(&told);
        assert!(text.contains("of one moment") && !text.contains("apart"), "{text}");
        told.disks.pop();
        told.dry_run = false;
        let text = show(&told);
        assert!(text.contains("`web` is started") && !text.contains("apart") && !text.contains("moment"), "{text}");
    }
}
