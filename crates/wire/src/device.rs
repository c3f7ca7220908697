//! Endpoint devices that somebody else makes: the host's sides of the pairs that lead into components' namespaces.

use crate::{WireError, Wires};
use godwit_net::{Net, NetError};

impl Wires {
    /// Isolates a device: it becomes a port of the pen, from wherever it is. One that is gone is isolated.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn hold(&self, device: &str) -> Result<(), WireError> {
        self.pen_in(device, true).await
    }

    /// Isolates a device that no wire has taken yet, as one that was just made; any other stays where it is.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn hold_free(&self, device: &str) -> Result<(), WireError> {
        self.pen_in(device, false).await
    }

    async fn pen_in(&self, device: &str, taken_as_well: bool) -> Result<(), WireError> {
        let work = async || -> Result<(), NetError> {
            let pen = self.pen().await?;
            let Some(link) = self.net().find(device).await? else { return Ok(()) };
            if link.master == Some(pen.index) || (link.master.is_some() && !taken_as_well) {
                return Ok(());
            }
            Net::without_ipv6(device)?;
            self.net().set_master(link.index, Some(pen.index)).await
        };
        work().await.map_err(|source| WireError::Net { doing: "isolate", object: device.to_owned(), source })
    }
}
