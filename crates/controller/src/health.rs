//! Whether this controller still does its work: what its watchdog asks before each sign of life.
//!
//! Its work is to read records, decide and write; so the question takes the lock of decisions on a thread of the blocking
//! pool and reads the store. The API's port is not asked: whoever can reach it could keep it so busy that the controller is
//! restarted. Nodes are not asked either: that one is gone is no fault of the controller's.

use crate::Controller;
use crate::store::Kind;
use std::sync::Arc;

/// Looks whether the controller does its work; says in a line how it stands. Never ends where the work is stuck, so it has
/// to be asked with a time limit.
///
/// # Errors
/// What the store says.
pub async fn look(controller: &Arc<Controller>) -> Result<String, String> {
    let reader = Arc::clone(controller);
    let read = tokio::task::spawn_blocking(move || {
        let _deciding = reader.decide();
        let count = |kind| reader.store.list(kind).map(|all| all.len()).map_err(|e| e.to_string());
        Ok::<_, String>(format!("{} hosts, {} VMs", count(Kind::Host)?, count(Kind::Vm)?))
    });
    read.await.map_err(|_| "reading the store ended in a bug of the controller".to_owned())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::FileStore;
    use godwit_trust::{Authority, Identity, Role, Validity};
    use std::time::Duration;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_decision_that_never_ends_leaves_the_question_without_an_answer() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("ca")).unwrap();
        let identity = Identity::new(Role::Controller, "controller").unwrap();
        authority.issue(&identity, Validity::days(1)).unwrap().write(&folder.path().join("cert")).unwrap();
        let credentials = godwit_trust::Credentials::load(&folder.path().join("cert")).unwrap();
        let store = Box::new(FileStore::open(&folder.path().join("store")).unwrap());
        let controller = Controller::new(store, credentials);
        assert_eq!(look(&controller).await.unwrap(), "0 hosts, 0 VMs");

        let (held, stuck) = (std::sync::mpsc::channel::<()>(), Arc::clone(&controller));
        let (taken, is_taken) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let _deciding = stuck.decide();
            taken.send(()).unwrap();
            let _ = held.1.recv();
        });
        is_taken.recv().unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(300), look(&controller)).await.is_err());
        drop(held.0);
        thread.join().unwrap();
        look(&controller).await.unwrap();
    }
}
