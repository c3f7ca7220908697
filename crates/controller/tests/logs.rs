//! What the controller logs of a move. Alone in its process: the log is everybody's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[allow(dead_code, reason = "other tests use the rest")]
mod fakes;

use fakes::World;
use godwit_api::progress::Outcome;

#[derive(Clone, Default)]
struct Lines(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn every_line_about_a_move_carries_its_number_and_its_vm() {
    use tracing_subscriber::prelude::*;
    let lines = Lines::default();
    let to = lines.clone();
    let layer = tracing_subscriber::fmt::layer().json().with_writer(move || to.clone());
    tracing_subscriber::registry().with(layer).init();
    let world = World::new().await;
    world.web().await;
    let id = world.order("texas").await.unwrap().id;
    world.hand_over("ohio", "texas");
    for host in ["ohio", "texas"] {
        world.say(host, id, |p| p.outcome = Outcome::Completed);
    }
    world.until(id, |mv| mv.progress.outcome == Outcome::Completed).await;
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let mut about = 0;
    for line in text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()) {
        if line["target"] == "godwit_controller::moves" {
            let span = &line["span"];
            assert_eq!((span["move"].as_u64(), span["vm"].as_str()), (Some(id.0), Some("web")), "{line}");
            about += 1;
        }
    }
    assert!(about >= 2, "{text}");
}
