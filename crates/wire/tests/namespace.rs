//! An endpoint on a real bridge, in a network namespace of its own. Needs root.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use godwit_wire::{Component, EndpointId, EndpointSpec, FoundState, Sequence, Stale, State, WireError, Wires};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

/// A guest of a few lines: holds the tap open, and answers ARP requests for 10.9.0.5.
fn guest(tap: &str) {
    let mut tun = common::tap(tap);
    std::thread::spawn(move || {
        let mut frame = [0; 2048];
        while let Ok(got) = tun.read(&mut frame) {
            if common::asks_for(&frame[..got], [10, 9, 0, 5]) {
                let _ = tun.write_all(&common::arp_answer(&frame[..got], [2, 0, 0, 0, 0, 5]));
            }
        }
    });
}

/// Wires beside a switch `br0`, in a namespace of their own.
fn on_a_switch(test: impl AsyncFnOnce(Wires) + Send + 'static) {
    std::thread::spawn(|| {
        // SAFETY: takes flags only, and changes this thread's namespace alone.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "needs root");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let wires = Wires::new("gw", [127, 0, 0, 1].into()).unwrap();
            wires.gateway_ensure("br0").await.unwrap();
            test(wires).await;
        });
    })
    .join()
    .unwrap();
}

#[test]
fn a_guest_on_a_switch_is_reachable_exactly_while_its_endpoint_is_active() {
    on_a_switch(async |wires| {
        let spec = EndpointSpec {
            id: EndpointId(1),
            tap: "gwtap1".into(),
            mac: "02:00:00:00:00:05".parse().unwrap(),
            mtu: 1500,
            component: Component::Switch { bridge: "br0".into() },
            ips: vec![[10, 9, 0, 5].into()],
        };
        let at = |generation| Sequence { lineage: 0, generation };
        let (short, long) = (Duration::from_millis(200), Duration::from_secs(60));
        assert!(matches!(wires.activate(&spec, at(1)).await, Err(WireError::Stale { why: Stale::NotStaged, .. })));
        wires.stage(&spec).await.unwrap();
        guest("gwtap1");
        assert!(matches!(wires.probe(&spec, short).await, Err(WireError::NoAnswer { .. })), "leaks when staged");
        for generation in 2..12 {
            let start = Instant::now();
            wires.activate(&spec, at(generation)).await.unwrap();
            let activated = start.elapsed();
            let probed = wires.probe(&spec, long).await.unwrap();
            wires.stage(&spec).await.unwrap();
            wires.probe(&spec, long).await.expect("staging again does not isolate");
            let start = Instant::now();
            wires.isolate(&spec).await.unwrap();
            println!("activate {activated:?} probe {probed:?} isolate {:?}", start.elapsed());
            assert!(matches!(wires.probe(&spec, Duration::from_millis(60)).await, Err(WireError::NoAnswer { .. })));
        }
        let stale = wires.activate(&spec, at(3)).await;
        assert!(matches!(stale, Err(WireError::Stale { why: Stale::Older { .. }, .. })), "{stale:?}");
        assert!(matches!(wires.probe(&spec, short).await, Err(WireError::NoAnswer { .. })));
        wires.remove(&spec).await.unwrap();
        wires.tidy().await.unwrap();
        assert_eq!(wires.list().await.unwrap(), []);
    });
}

/// An endpoint of a guest with several.
fn one_of(number: u8) -> EndpointSpec {
    EndpointSpec {
        id: EndpointId(number.into()),
        tap: format!("gwtap{number}"),
        mac: format!("02:00:00:00:00:0{number}").parse().unwrap(),
        mtu: 1500,
        component: Component::Switch { bridge: "br0".into() },
        ips: vec![],
    }
}

async fn states(wires: &Wires) -> Vec<State> {
    let found = wires.list().await.unwrap().into_iter();
    let states = found.filter_map(|found| match found.state {
        FoundState::Endpoint(state) => Some((found.name, state)),
        _ => None,
    });
    let mut states: Vec<_> = states.collect();
    states.sort_by(|a, b| a.0.cmp(&b.0));
    states.into_iter().map(|(_, state)| state).collect()
}

#[test]
fn a_guests_endpoints_are_opened_all_or_none_and_closed_as_far_as_that_is_possible() {
    on_a_switch(async |wires| {
        let at = |generation| Sequence { lineage: 0, generation };
        let guest = [one_of(1), one_of(2), one_of(3)];
        let early = wires.activate_all(&guest, at(1)).await;
        assert!(matches!(early, Err(WireError::Stale { why: Stale::NotStaged, .. })), "{early:?}");
        wires.stage_all(&guest[..2]).await.unwrap();
        let early = wires.activate_all(&guest, at(1)).await;
        assert!(matches!(early, Err(WireError::Stale { why: Stale::NotStaged, .. })), "{early:?}");
        assert_eq!(states(&wires).await, [State::Staged; 2], "some are open without the last");
        wires.stage_all(&guest).await.unwrap();
        wires.activate_all(&guest, at(1)).await.unwrap();
        assert_eq!(states(&wires).await, [State::Active(at(1)); 3]);
        wires.stage_all(&guest).await.unwrap();
        assert_eq!(states(&wires).await, [State::Active(at(1)); 3], "staging again isolates");

        let strange = EndpointSpec { tap: "eth0".into(), ..one_of(4) };
        let with_strange = [std::slice::from_ref(&strange), &guest].concat();
        let isolated = wires.isolate_all(&with_strange).await;
        assert!(matches!(isolated, Err(WireError::BadName { .. })), "{isolated:?}");
        assert_eq!(states(&wires).await, [State::Isolated(at(1)); 3], "one that cannot be isolated keeps others open");

        wires.activate(&guest[1], at(5)).await.unwrap();
        wires.isolate(&guest[1]).await.unwrap();
        let stale = wires.activate_all(&guest, at(3)).await;
        assert!(matches!(stale, Err(WireError::Stale { why: Stale::Older { .. }, .. })), "{stale:?}");
        let [first, last] = [State::Isolated(at(1)), State::Isolated(at(5))];
        assert_eq!(states(&wires).await, [first, last, first], "an owner of old has opened some of them");

        let removed = wires.remove_all(&with_strange).await;
        assert!(matches!(removed, Err(WireError::BadName { .. })), "{removed:?}");
        assert_eq!(states(&wires).await, []);
        wires.tidy().await.unwrap();
    });
}
