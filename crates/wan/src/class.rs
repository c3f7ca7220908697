//! Whose bytes they are: traffic classes, told apart by port.
//!
//! A migration's cost is judged by class (memory, disk, everything else), and the emulator sees ciphertext. What it can
//! see is ports, and those the operator chose. A frame belongs to the first rule that matches its source *or* its
//! destination port, so that replies count with their requests. Beware of rules that overlap the ephemeral range
//! (`net.ipv4.ip_local_port_range`): a stranger's connection may draw such a port by chance.

use serde::{Deserialize, Serialize};
use std::ops::{Index, IndexMut, RangeInclusive};

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A VM's memory under way.
    Memory,
    /// A volume's blocks under way.
    Disk,
    /// Commands and answers between nodes and controller.
    Control,
    /// The VM's own traffic with its clients.
    Client,
    /// The same inside an encrypted tunnel.
    Tunnel,
    /// What no rule matches: ARP, ICMP, later fragments of a datagram, strangers.
    Other,
}

impl Class {
    /// Every class, in order.
    pub const ALL: [Self; 6] = [Self::Memory, Self::Disk, Self::Control, Self::Client, Self::Tunnel, Self::Other];
}

/// A frame's two ports; their order does not matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The sender's.
    pub source: u16,
    /// The receiver's.
    pub destination: u16,
}

/// Rules in order; the first that matches decides. Without rules everything is [`Class::Other`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Classifier {
    rules: Vec<(RangeInclusive<u16>, Class)>,
}

impl Classifier {
    /// A classifier of these rules.
    #[must_use]
    pub fn new(rules: impl IntoIterator<Item = (RangeInclusive<u16>, Class)>) -> Self {
        Self { rules: rules.into_iter().collect() }
    }

    /// The class of a frame with these ports, or without any.
    #[must_use]
    pub fn classify(&self, ports: Option<Ports>) -> Class {
        let Some(ports) = ports else { return Class::Other };
        self.rules
            .iter()
            .find(|(range, _)| range.contains(&ports.source) || range.contains(&ports.destination))
            .map_or(Class::Other, |&(_, class)| class)
    }
}

/// One value for each class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PerClass<T> {
    /// For [`Class::Memory`].
    pub memory: T,
    /// For [`Class::Disk`].
    pub disk: T,
    /// For [`Class::Control`].
    pub control: T,
    /// For [`Class::Client`].
    pub client: T,
    /// For [`Class::Tunnel`].
    pub tunnel: T,
    /// For [`Class::Other`].
    pub other: T,
}

impl<T> PerClass<T> {
    /// A value for each class, from a function of the class.
    pub fn from_fn(mut value: impl FnMut(Class) -> T) -> Self {
        Self {
            memory: value(Class::Memory),
            disk: value(Class::Disk),
            control: value(Class::Control),
            client: value(Class::Client),
            tunnel: value(Class::Tunnel),
            other: value(Class::Other),
        }
    }
}

impl<T> Index<Class> for PerClass<T> {
    type Output = T;
    fn index(&self, class: Class) -> &T {
        match class {
            Class::Memory => &self.memory,
            Class::Disk => &self.disk,
            Class::Control => &self.control,
            Class::Client => &self.client,
            Class::Tunnel => &self.tunnel,
            Class::Other => &self.other,
        }
    }
}

impl<T> IndexMut<Class> for PerClass<T> {
    fn index_mut(&mut self, class: Class) -> &mut T {
        match class {
            Class::Memory => &mut self.memory,
            Class::Disk => &mut self.disk,
            Class::Control => &mut self.control,
            Class::Client => &mut self.client,
            Class::Tunnel => &mut self.tunnel,
            Class::Other => &mut self.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classify(source: u16, destination: u16) -> Class {
        let rules = [(7000..=7009, Class::Memory), (7000..=7099, Class::Disk), (443..=443, Class::Client)];
        Classifier::new(rules).classify(Some(Ports { source, destination }))
    }

    #[test]
    fn either_port_decides_and_the_first_rule_wins() {
        assert_eq!(classify(40_000, 7009), Class::Memory);
        assert_eq!(classify(7009, 40_000), Class::Memory);
        assert_eq!(classify(40_000, 7010), Class::Disk);
        assert_eq!(classify(443, 7010), Class::Disk, "by order of rules, not of ports");
        assert_eq!(classify(1, 2), Class::Other);
    }

    #[test]
    fn a_frame_without_ports_is_other() {
        assert_eq!(Classifier::new([(0..=u16::MAX, Class::Disk)]).classify(None), Class::Other);
    }

    #[test]
    fn every_class_has_a_place_of_its_own() {
        let mut values = PerClass::from_fn(|class| class);
        assert!(Class::ALL.iter().all(|&class| values[class] == class));
        values[Class::Client] = Class::Other;
        assert_eq!(values.client, Class::Other);
    }
}
