//! The user's own network in a run: components and wires, made by the user's commands, and components' moves.
//!
//! A guest's `eth0` stays on the lab's segment, by which it is loaded and checked; what the scenario wires are its further interfaces.
//! At the end of a pass `godwit net check` looks at all of it: what it finds is a warning of the run.

use crate::godwit::host_of;
use crate::pass::Pass;
use crate::report::{ComponentReport, Mark, Outcome};
use crate::scenario::{Component, ComponentStep};
use anyhow::Result;
use godwit_api::component::ComponentObject;
use godwit_api::progress;
use std::time::Instant;

impl Pass {
    /// Makes the scenario's components, each where it begins.
    ///
    /// # Errors
    /// With the command's words.
    pub(crate) fn make_components(&self) -> Result<()> {
        let Some(installation) = &self.installation else { return Ok(()) };
        for Component { name, kind, site, ports, config } in &self.scenario.component {
            let (name, ports, host) = (name.get_ref(), ports.get_ref().to_string(), host_of(site.get_ref()));
            self.progress.note(&format!("making {name}"));
            let words = ["component", "create", name, "--kind", kind.get_ref(), "--ports", &ports, "--host", &host];
            let file = (!config.is_empty()).then_some(["--config", "-"]);
            let words: Vec<&str> = words.into_iter().chain(file.into_iter().flatten()).collect();
            installation.command_with(words, (!config.is_empty()).then_some(config.as_str()))?;
        }
        Ok(())
    }

    /// Connects the scenario's wires; the objects at their ends are there.
    ///
    /// # Errors
    /// With the command's words.
    pub(crate) fn connect_wires(&self) -> Result<()> {
        let Some(installation) = &self.installation else { return Ok(()) };
        for wire in &self.scenario.wire {
            let [a, b] = wire.ends.get_ref();
            installation.command(["wire", "connect", a, b])?;
        }
        Ok(())
    }

    /// Moves a component, and waits until it is there.
    ///
    /// # Errors
    /// When its host does not say how it stands; a move that fails is in the report.
    pub(crate) fn move_component(&mut self, step: &ComponentStep) -> Result<()> {
        let (name, to) = (step.component.get_ref(), step.to.get_ref());
        let Some(installation) = self.installation.clone() else {
            self.leave_out("move = { component");
            return Ok(());
        };
        let from = installation.json::<ComponentObject>(&["component", "show", name])?.site.to_string();
        self.progress.note(&format!("moving {name} to {to}"));
        let began = Instant::now();
        let moved = installation.json::<ComponentObject>(&["move", name, "--to", to]);
        let ended = Instant::now();
        let (figures, why) = match &moved {
            Ok(component) => (component.last_move.as_ref(), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let completed = figures.is_some_and(|mv| mv.outcome == progress::Outcome::Completed);
        self.components.push(ComponentReport {
            component: name.clone(),
            from,
            to: to.clone(),
            outcome: if completed { Outcome::Completed } else { Outcome::Failed },
            why: why.or_else(|| figures.filter(|_| !completed).map(|mv| format!("it ended as {:?}", mv.outcome))),
            at_s: self.seconds(began),
            total_s: (ended - began).as_secs_f64(),
            isolated_ms: figures.and_then(|mv| mv.isolated_ms),
            stations: figures.map_or(0, |mv| mv.stations as u64),
            flows: figures.map_or(0, |mv| mv.flows as u64),
        });
        let mark = Mark {
            what: name.clone(),
            to: to.clone(),
            start_s: self.seconds(began),
            end_s: self.seconds(ended),
            ..Mark::default()
        };
        self.marks.push(mark);
        Ok(())
    }

    /// Whether anything keeps frames from where they should go; after the last step, with no move under way.
    pub(crate) fn check_network(&mut self) {
        let has_any = !self.scenario.wire.is_empty() || !self.scenario.extender.is_empty();
        let Some(installation) = self.installation.as_ref().filter(|_| has_any) else { return };
        if let Err(error) = installation.command(["net", "check"]) {
            self.warnings.push(format!("the network at the end: {error:#}"));
        }
    }

    /// Seconds from the first step; negative before it.
    pub(crate) fn seconds(&self, at: Instant) -> f64 {
        match at.checked_duration_since(self.zero) {
            Some(later) => later.as_secs_f64(),
            None => -(self.zero - at).as_secs_f64(),
        }
    }
}
