//! The step `precache`: a VM's volumes are kept nearly equal at another site, by the user's command, and the scenario goes on when
//! the secondary lags behind by no more than it says.

use crate::godwit::hosted::volume_name;
use crate::machine::Machine;
use crate::pass::{Pass, lock};
use crate::scenario::Precache;
use anyhow::{Context, Result, bail};
use godwit_api::precache::{Precache as Told, PrecacheState};
use std::time::{Duration, Instant};

/// Between two looks at how it stands.
const LOOK: Duration = Duration::from_millis(500);

impl Pass {
    /// Orders pre-caches of all of a VM's volumes, and waits for them; or ends them.
    ///
    /// # Errors
    /// With the command's words, or when the secondary lags behind for longer than the step allows.
    pub(crate) fn precache(&mut self, step: &Precache) -> Result<()> {
        let (name, to) = (step.vm.get_ref(), step.to.get_ref());
        self.join(|vm| vm == name);
        let vm = self.vm(name);
        let guest = lock(&vm.guest);
        let Some(Machine::Godwit(hosted)) = guest.as_ref() else {
            drop(guest);
            self.leave_out("precache");
            return Ok(());
        };
        let installation = hosted.installation().clone();
        let volumes: Vec<String> = (0..hosted.volumes.len()).map(|disk| volume_name(name, disk)).collect();
        drop(guest);
        self.progress.note(&format!("pre-caching {name} in {to}"));
        for volume in &volumes {
            let interval = format!("{}s", step.interval_s);
            let mut order = vec!["volume", "precache", volume, "--to", to];
            if step.stop {
                order.push("--stop");
            } else {
                order.extend(["--interval", &interval]);
                order.extend(step.consistent.then_some("--consistent"));
                order.extend(step.follow.then_some("--follow"));
                order.extend(step.limit.as_deref().into_iter().flat_map(|limit| ["--limit", limit]));
            }
            installation.command(order)?;
        }
        let began = Instant::now();
        while !step.stop {
            let told: Vec<Told> = installation.json(&["volume", "status"])?;
            let good = |volume: &String| {
                let mut of = told.iter().filter(|t| t.volume.as_str() == volume && t.site.as_str() == to);
                of.any(|t| {
                    t.figures.as_ref().is_some_and(|f| {
                        let following = f.state == PrecacheState::Following && (f.image || !step.consistent);
                        following && f.lag_s.is_some_and(|lag| lag <= step.lag_s)
                    })
                })
            };
            if volumes.iter().all(good) {
                break;
            }
            if began.elapsed().as_secs_f64() > step.timeout_s {
                let stands = told.iter().map(|t| format!("{}: {:?}", t.volume, t.figures)).collect::<Vec<_>>();
                bail!("`{name}` lags behind in {to} by more than {} s: {}", step.lag_s, stands.join("; "));
            }
            std::thread::sleep(LOOK);
        }
        let s = began.elapsed().as_secs_f64();
        self.progress.note(&format!("{name} is pre-cached in {to} after {s:.1} s"));
        let said = installation.command(["volume", "status"]).context("`godwit volume status`")?;
        self.progress.note(&said);
        Ok(())
    }
}
