//! Whether this node still does its work: what its watchdog asks before each sign of life.
//!
//! A process that is there may all the same do nothing: a lock that is never let go, a pool of threads that all wait, a keeper
//! that no longer hears. So the question goes where the work goes: a thread of the blocking pool takes the locks of the VMs
//! and of the records and reads each VM's record; each VM's keeper is asked, and has to answer. What hangs, hangs here too.
//!
//! The API's port is not asked, nor any QEMU. Whoever can reach the port could otherwise keep it so busy that the node is restarted,
//! and a guest that hangs would take its node with it; the node tells a QEMU that says nothing from one that is gone by itself.

use crate::actor::Input;
use crate::node::Node;
use std::sync::Arc;

/// Looks whether the node does its work; says in a line how it stands. Never ends where the work is stuck, so it has to be asked
/// with a time limit.
///
/// # Errors
/// What cannot be read.
pub async fn look(node: &Arc<Node>) -> Result<String, String> {
    let reader = node.clone();
    let read = tokio::task::spawn_blocking(move || {
        let vms = reader.vms();
        for parts in &vms {
            godwit_handoff::Ledger::load(&*reader.ledger(), parts.id)
                .map_err(|e| format!("the record of `{}` cannot be read: {e}", parts.name))?;
        }
        Ok::<_, String>(vms)
    });
    let vms = read.await.map_err(|_| "reading the records ended in a bug of the node".to_owned())??;
    for parts in &vms {
        // A question whose answer does not matter here, and which changes nothing.
        let _ = parts.keeper().ask(Input::MayRemove).await;
    }
    let running = vms.iter().filter(|parts| parts.qemu().is_some_and(|qemu| qemu.is_alive())).count();
    Ok(format!("{} VMs known, {running} of them with a QEMU here", vms.len()))
}
