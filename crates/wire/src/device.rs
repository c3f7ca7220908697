//! Endpoint devices that somebody else makes: the host's sides of the pairs that lead into components' namespaces.

use crate::{WireError, Wires};
use godwit_net::{Net, NetError};

impl Wires {
    /// Isolates a device that no wire has taken yet, as one that was just made; any other stays where it is.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn hold_free(&self, device: &str) -> Result<(), WireError> {
        let work = async || -> Result<(), NetError> {
            let pen = self.pen().await?;
            let Some(link) = self.net().find(device).await? else { return Ok(()) };
            if link.master.is_some() {
                return Ok(());
            }
            Net::without_ipv6(device)?;
            self.net().set_master(link.index, Some(pen.index)).await
        };
        work().await.map_err(|source| WireError::Net { doing: "isolate", object: device.to_owned(), source })
    }
}
