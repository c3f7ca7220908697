//! Being a node of an installation: its own certificate is exchanged in time, and revoked peers are shut out.
//!
//! # What can go wrong
//!
//! *The controller is away when the certificate ends.* There is a third of the certificate's life to try in, and it is tried all that
//! time. Sessions that stand when it ends go on; new ones fail.
//!
//! *A node was down when somebody was revoked.* The controller tells it when it is up; until then it goes by the list that it kept. The controller
//! sees which list that is, so a node that was made anew, or brought back from a copy, is told as well.

use crate::node::Node;
use anyhow::{Context, Result};
use godwit_api::trust::Home;
use godwit_api::{ApiError, Problem};
use godwit_trust::{Credentials, Identity, KeyRequest, Revocations};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// The longest time between two looks at the clock: it may be set meanwhile.
const LOOK: Duration = Duration::from_secs(60);
/// The shortest, for certificates that last minutes.
const SOON: Duration = Duration::from_secs(1);

/// What a node knows of its membership.
#[derive(Debug)]
pub struct Membership {
    /// Where the certificate can be renewed, for a node that has enrolled.
    home: Option<Home>,
    /// Whether the last try to renew has failed.
    failing: AtomicBool,
    /// Where the list of revocations is kept.
    list: PathBuf,
    /// Held from the look at the list at hand until the next one counts: else an older one could be kept over a newer.
    listing: Mutex<()>,
}

impl Membership {
    /// From what is in the folder of the certificate and in the node's own; `credentials` go by the list that was kept.
    ///
    /// # Errors
    /// A file is there and makes no sense. A node that cannot tell who is revoked does not start.
    pub fn recall(certificates: &Path, state: &Path, credentials: &Credentials) -> Result<Self> {
        let list = state.join("revoked.json");
        if let Some(kept) = read::<Revocations>(&list)? {
            credentials.revoke(kept)?;
        }
        let home = read(&certificates.join(Home::FILE))?;
        Ok(Self { home, failing: AtomicBool::new(false), list, listing: Mutex::default() })
    }

    /// Whether the certificate is renewed by itself, as far as can be told.
    #[must_use]
    pub fn renews(&self) -> bool {
        self.home.is_some() && !self.failing.load(Ordering::Relaxed)
    }

    fn keep(&self, list: &Revocations) -> io::Result<()> {
        crate::durable::replace_json(&self.list, list)
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).with_context(|| path.display().to_string()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

impl Node {
    /// The controller's list of revocations. Kept before it counts, and who is new in it is shut out at once.
    ///
    /// # Errors
    /// The list cannot be kept, or is longer than any of ours.
    pub fn revoke(&self, list: &Revocations) -> Result<(), ApiError> {
        let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, format!("{}: {e}", self.name()));
        list.check().map_err(|e| ApiError::new(Problem::Invalid, e.to_string()))?;
        let _listing = crate::parts::lock(&self.membership().listing);
        let before = self.credentials().revocations();
        if list.version <= before.version {
            return Ok(());
        }
        self.membership().keep(list).map_err(|e| failed(&e))?;
        self.credentials().revoke(list.clone()).map_err(|e| failed(&e))?;
        let new: Vec<&Identity> = list
            .holders
            .iter()
            .filter(|(who, when)| before.holders.get(who) != Some(when))
            .map(|(who, _)| who)
            .collect();
        for who in new {
            tracing::warn!(%who, "revoked: its sessions end");
            self.peers().disconnect(who);
        }
        Ok(())
    }

    /// Renews the certificate whenever it is time, for as long as the node is there.
    pub fn renew_in_time(self: &Arc<Self>) {
        let Some(home) = self.membership().home.clone() else { return };
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                let Some(node) = node.upgrade() else { return };
                let (now, at, end) = (SystemTime::now(), node.credentials().renew_at(), node.credentials().expiry());
                let mut wait = at.duration_since(now).unwrap_or_default();
                if wait.is_zero() {
                    let renewed = renew(&node, &home).await;
                    node.membership().failing.store(renewed.is_err(), Ordering::Relaxed);
                    match renewed {
                        Ok(()) => tracing::info!("the node's certificate was renewed"),
                        Err(error) => tracing::error!(
                            error = format!("{error:#}"),
                            "the node's certificate cannot be renewed; trying again"
                        ),
                    }
                    // Some ten tries in what is left of it.
                    wait = end.duration_since(now).unwrap_or_default() / 10;
                }
                drop(node);
                tokio::time::sleep(wait.clamp(SOON, LOOK)).await;
            }
        });
    }
}

async fn renew(node: &Arc<Node>, home: &Home) -> Result<()> {
    let credentials = node.credentials();
    let key = KeyRequest::new(credentials.identity())?;
    let given = home.renew(credentials, key.request_pem.clone()).await?;
    Ok(credentials.renew(&node.config().credentials, &given.certificate, &key.key_pem)?)
}
