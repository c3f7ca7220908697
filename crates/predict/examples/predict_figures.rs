//! Draws the paper's figure 1 as AVG has it: time and downtime of a 1,024 MiB guest over its dirty rate, on three links.
//!
//! `cargo run --release -p godwit-predict --example predict_figures -- FOLDER`

#![allow(clippy::unwrap_used, reason = "an example that cannot go on has failed")]

use godwit_predict::figure::{Mark, Quantity, Scale, Series, curve, draw};
use godwit_predict::{Link, Overheads, PageRate, Rules};
use godwit_units::{BitRate, Bytes};
use std::path::PathBuf;
use std::time::Duration;

fn main() {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("name the folder to write the drawings to");
        std::process::exit(2);
    };
    std::fs::create_dir_all(&folder).unwrap();
    let overheads = Overheads { pre: Duration::from_millis(3800), post: Duration::from_millis(314) };
    // Goodputs of the paper's Table I.
    for (name, mbit) in [("100mbit", 94.208), ("1gbit", 935.335), ("10gbit", 7130.354)] {
        let link = Link { rate: BitRate::from_mbit(mbit), overheads };
        let rules = [Rules::xen(), Rules::smart_stop(), Rules::godwit()];
        let curves: Vec<_> = rules
            .into_iter()
            .enumerate()
            .map(|(colour, rules)| Series {
                name: rules.name.clone(),
                mark: Mark::Line,
                colour,
                points: curve(Bytes::mib(1024), link, &rules, PageRate::new(300_000.0), 600),
            })
            .collect();
        for (what, quantity) in [("total", Quantity::Total), ("downtime", Quantity::Downtime)] {
            let file = folder.join(format!("figure-1-{name}-{what}.svg"));
            let title = format!("1,024 MiB over {} of goodput", link.rate);
            std::fs::write(&file, draw(&title, quantity, Scale::Linear, &curves)).unwrap();
            println!("{}", file.display());
        }
    }
}
