//! Who may take part: enrolment, renewal and revocation, as nodes and people ask the controller for them.
//!
//! | request | body -> answer |
//! |---|---|
//! | `POST /v1/hosts/{host}/token` | [`NewToken`] -> [`Token`]: what a host enrols with, shown once |
//! | `POST /v1/enrolment` | [`Enrol`] -> [`Certificate`]; the one request that needs no certificate |
//! | `POST /v1/renewal` | [`Renew`] -> [`Certificate`], for the node that asks |
//! | `POST /v1/hosts/{host}/revoke` | -> [`Revocations`]: its certificates until now are void |
//! | `GET /v1/tokens`, `POST`, `DELETE /v1/tokens/{token}` | [`NewApiToken`] -> [`Token`], [`ApiToken`]: for people of a domain |
//! | `GET /v1/revocations`, `POST` | [`Revoke`] -> [`Revocations`]: for any holder |
//!
//! And as the controller asks nodes: `PUT /v1/revocations`, [`Revocations`].
//!
//! Requests with secrets in them show none of it when they are printed for debugging.

use crate::{ApiError, Client, Name, Problem};
use godwit_trust::{AccessToken, Credentials, EnrolmentToken, Identity, Revocations, enrolment_client};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// How long an enrolment, or a renewal, may take.
const WITHIN: Duration = Duration::from_secs(30);

/// Asks for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewToken {
    /// How long it is good for, seconds.
    #[schemars(range(min = 1, max = 604_800))]
    pub ttl_s: u64,
}

/// A token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Token {
    /// All of it; a secret.
    pub token: String,
    /// When it ends, seconds since 1970.
    pub expires_unix_s: u64,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires_unix_s", &self.expires_unix_s).finish_non_exhaustive()
    }
}

/// What the holder of a token may do in its domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TokenRole {
    /// Look.
    Viewer,
    /// Look, and move VMs.
    Operator,
    /// Create, start, stop and delete VMs, too.
    Admin,
}

impl fmt::Display for TokenRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        })
    }
}

/// Asks for a token for people or programs of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewApiToken {
    /// What it is called.
    pub name: Name,
    /// The domain.
    pub domain: Name,
    /// What its holder may do there.
    pub role: TokenRole,
    /// How long it is good for, seconds.
    #[schemars(range(min = 1, max = 31_622_400))]
    pub ttl_s: u64,
}

/// A token that was made, without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiToken {
    /// What it is called.
    pub name: Name,
    /// The domain.
    pub domain: Name,
    /// What its holder may do there.
    pub role: TokenRole,
    /// When it ends, seconds since 1970.
    pub expires_unix_s: u64,
}

/// A host wants to be a node.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Enrol {
    /// Who it wants to be.
    pub name: Name,
    /// The secret of its token.
    pub secret: String,
    /// The request for its key, PEM.
    pub request: String,
}

impl fmt::Debug for Enrol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enrol").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A node wants another certificate of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// The request for its new key, PEM.
    pub request: String,
}

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Certificate {
    /// The CA's, PEM.
    pub ca: String,
    /// The holder's, PEM.
    pub certificate: String,
}

/// Makes everything void that a holder was issued until now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Revoke {
    /// Whose certificates.
    #[schemars(
        with = "String",
        regex(pattern = r"^(controller|node|admin|operator)/[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?$"),
        extend("examples" = ["admin/ann"])
    )]
    pub identity: Identity,
}

/// Where a node renews its certificate; a file beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// The controller's API, `HOST:PORT`.
    pub controller: String,
    /// The controller's name, as in its certificate.
    pub name: Name,
}

impl Home {
    /// The file's name, in the folder of the certificate.
    pub const FILE: &str = "controller.json";

    fn identity(&self) -> Result<Identity, ApiError> {
        Identity::new(godwit_trust::Role::Controller, self.name.as_str())
            .map_err(|e| ApiError::new(Problem::Invalid, e.to_string()))
    }

    /// Has a key certified that was made here, by a controller that shows the CA of the token and no other.
    ///
    /// # Errors
    /// The controller's own, or that it cannot be reached or believed.
    pub async fn enrol(&self, token: &EnrolmentToken, request: String) -> Result<Certificate, ApiError> {
        let tls = enrolment_client(&token.authority, crate::server::ALPN);
        let client = Client::with_tls(&self.controller, self.identity()?, tls, WITHIN);
        let name = token.identity.name();
        let name = name.parse().map_err(|e: crate::name::NotAName| ApiError::new(Problem::Invalid, e.to_string()))?;
        let enrol = Enrol { name, secret: token.secret.reveal().to_owned(), request };
        let given: Certificate = client.post("/v1/enrolment", &enrol).await?;
        godwit_trust::check_authority(&given.ca, &token.authority)
            .map_err(|e| ApiError::new(Problem::Failed, e.to_string()))?;
        Ok(given)
    }

    /// Has another key of ours certified.
    ///
    /// # Errors
    /// The controller's own, or that it cannot be reached.
    pub async fn renew(&self, credentials: &Credentials, request: String) -> Result<Certificate, ApiError> {
        let client = Client::new(&self.controller, self.identity()?, credentials, WITHIN);
        client.post("/v1/renewal", &Renew { request }).await
    }
}

impl crate::HostClient {
    /// `PUT /v1/revocations`.
    ///
    /// # Errors
    /// The node's, or that it cannot be reached.
    pub async fn revoke(&self, list: &Revocations) -> Result<(), ApiError> {
        self.client().put::<serde::de::IgnoredAny>("/v1/revocations", list).await.map(drop)
    }
}

impl crate::PublicClient {
    /// For somebody who has a token and no certificate. The controller at `address` must show the token's CA.
    #[must_use]
    pub fn with_token(address: impl ToString, expected: Identity, token: &AccessToken) -> Self {
        let tls = enrolment_client(&token.authority, crate::server::ALPN);
        Self::of(Client::with_tls(address, expected, tls, crate::clients::ORDER).bearing(&token.reveal()))
    }

    /// `POST /v1/tokens`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn create_token(&self, new: &NewApiToken) -> Result<Token, ApiError> {
        self.client().post("/v1/tokens", new).await
    }

    /// `GET /v1/tokens`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn tokens(&self) -> Result<Vec<ApiToken>, ApiError> {
        self.client().get("/v1/tokens").await
    }

    /// `DELETE /v1/tokens/{token}`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn remove_token(&self, name: &Name) -> Result<(), ApiError> {
        self.client().delete::<serde::de::IgnoredAny>(&format!("/v1/tokens/{name}")).await.map(drop)
    }

    /// `POST /v1/hosts/{host}/token`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn host_token(&self, host: &Name, ttl: Duration) -> Result<Token, ApiError> {
        let new = NewToken { ttl_s: ttl.as_secs() };
        self.client().post(&format!("/v1/hosts/{host}/token"), &new).await
    }

    /// `POST /v1/hosts/{host}/revoke`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn revoke_host(&self, host: &Name) -> Result<Revocations, ApiError> {
        self.client().post(&format!("/v1/hosts/{host}/revoke"), &serde_json::json!({})).await
    }

    /// `POST /v1/revocations`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn revoke(&self, identity: &Identity) -> Result<Revocations, ApiError> {
        self.client().post("/v1/revocations", &Revoke { identity: identity.clone() }).await
    }

    /// `GET /v1/revocations`.
    ///
    /// # Errors
    /// The controller's, or that it cannot be reached.
    pub async fn revocations(&self) -> Result<Revocations, ApiError> {
        self.client().get("/v1/revocations").await
    }
}

impl crate::vm::VmDefinition {
    /// Names what a VM is made of, for capabilities: BLAKE3 of its JSON in a form that is the same in all versions
    /// ([`canonical`](crate::canonical)). How many CPUs it has is left out, since they are plugged in on the way; how many it
    /// may have is not.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut same = self.clone();
        same.spec.vcpus = 0;
        let value = serde_json::to_value(&same).expect("plain data has a JSON form");
        *blake3::hash(&crate::canonical::bytes(&value)).as_bytes()
    }

    /// Its volumes in rising order.
    #[must_use]
    pub fn sorted_volumes(&self) -> Vec<godwit_units::VolumeId> {
        let mut volumes = self.volumes.clone();
        volumes.sort_unstable();
        volumes
    }

    /// Its wires' numbers in rising order.
    #[must_use]
    pub fn sorted_wires(&self) -> Vec<u32> {
        let mut wires: Vec<u32> = self.wires.iter().map(|w| w.id).collect();
        wires.sort_unstable();
        wires
    }
}
