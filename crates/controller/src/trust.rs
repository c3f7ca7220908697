//! Who may take part: tokens, certificates, revocations.
//!
//! Whatever is decided here is stored before anybody hears of it. A token's use and the decision to sign are one commit, under the
//! lock that all decisions take: of two that come with the same token one is refused. A revocation counts here with the
//! handshake that follows and with the next signature, and is told to the nodes until each says that it has it; a node keeps its list over restarts.

use crate::state::{Controller, conflict, invalid};
use crate::store::{Change, Kind};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::trust::{Certificate, Enrol, NewToken, Renew, Revoke, Token};
use godwit_api::{ApiError, Name, Problem};
use godwit_trust::{
    Authority, Credentials, EnrolmentToken, Identity, KeyRequest, PeerCertificate, Revocations, Role, Secret,
    TrustError, Validity,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// The longest that a token is good for: whoever finds it later finds nothing.
const LONGEST_TOKEN: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a token that was used, or is over, is remembered: so that who comes with it is told which.
const REMEMBERED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Tokens that are remembered at most. More than any installation has hosts to add in a month.
const MOST_TOKENS: usize = 10_000;

/// The key of the one list of revocations.
const LIST: &str = "list";

/// A token, as it is stored: its hash is the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TokenRecord {
    name: Name,
    expires_unix_s: u64,
    /// When it was used, or its host revoked, if it was.
    spent_unix_s: Option<u64>,
}

/// The CA, where the controller has it, and what it issues.
#[derive(Debug)]
pub struct Issuer {
    /// The CA.
    pub authority: Authority,
    /// How long nodes' certificates, and its own, last.
    pub life: Duration,
    /// The folder of the controller's own certificate.
    pub credentials: PathBuf,
}

/// What the controller knows of trust besides its store.
#[derive(Debug, Default)]
pub struct Trust {
    issuer: OnceLock<Issuer>,
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn failed(error: TrustError) -> ApiError {
    ApiError::new(Problem::Failed, error.to_string())
}

fn forbidden(message: impl Into<String>, remedy: &str) -> ApiError {
    ApiError::new(Problem::Forbidden, message).remedy(remedy)
}

impl Trust {
    /// Makes the CA available; once.
    pub fn issue_with(&self, issuer: Issuer) {
        let _ = self.issuer.set(issuer);
    }

    fn issuer(&self) -> Result<&Issuer, ApiError> {
        self.issuer.get().ok_or_else(|| {
            conflict("this controller has no authority, so it issues no certificates")
                .remedy("start it with --authority DIR; `godwit init` makes one")
        })
    }
}

/// The list of revocations, as it is stored.
fn stored(c: &Controller) -> Result<Revocations, ApiError> {
    Ok(c.store.read(Kind::Revocation, LIST)?.unwrap_or_default())
}

/// What a controller does before it serves: it goes by the list that it stored.
///
/// # Errors
/// The store's.
pub fn recall(c: &Controller) -> Result<(), ApiError> {
    c.credentials().revoke(stored(c)?).map_err(failed)?;
    Ok(())
}

fn sign(c: &Controller, request: &str, whom: &Identity) -> Result<Certificate, ApiError> {
    let issuer = c.trust().issuer()?;
    let validity = stored(c)?.earliest(whom, Validity::lasting(issuer.life));
    let certificate = issuer.authority.sign(request, whom, validity);
    let certificate = certificate.map_err(|e| invalid(e.to_string()))?;
    Ok(Certificate { ca: issuer.authority.pem().to_owned(), certificate })
}

pub async fn token(State(c): Shared, Path(name): Path<Name>, Json(new): Json<NewToken>) -> Answer<Token> {
    let authority = c.trust().issuer()?.authority.fingerprint().to_owned();
    let ttl = Duration::from_secs(new.ttl_s);
    if ttl.is_zero() || ttl > LONGEST_TOKEN {
        let most = LONGEST_TOKEN.as_secs() / 3600;
        return Err(invalid(format!("a token lasts at least a second, and {most} hours at the most")));
    }
    let identity = Identity::node(name.as_str()).map_err(|e| invalid(e.to_string()))?;
    let token = EnrolmentToken { identity, authority, secret: Secret::new().map_err(failed)? };
    let now = now_s();
    let record = TokenRecord { name, expires_unix_s: now + new.ttl_s, spent_unix_s: None };
    let _deciding = c.decide();
    let mut changes = vec![Change::put(Kind::Enrolment, token.secret.hash(), &record)];
    let known = c.store.list(Kind::Enrolment)?;
    let mut left = known.len();
    for (hash, bytes) in known {
        let old: Option<TokenRecord> = serde_json::from_slice(&bytes).ok();
        if old.is_none_or(|old| old.expires_unix_s + REMEMBERED.as_secs() < now) {
            changes.push(Change::remove(Kind::Enrolment, hash));
            left -= 1;
        }
    }
    if left >= MOST_TOKENS {
        return Err(conflict(format!("{MOST_TOKENS} tokens were made within a month")).remedy("wait for some to end"));
    }
    c.store.commit(&changes)?;
    tracing::info!(host = %record.name, expires_unix_s = record.expires_unix_s, "a token for a host was made");
    Ok(Json(Token { token: token.reveal(), expires_unix_s: record.expires_unix_s }))
}

pub async fn enrol(State(c): Shared, Json(asked): Json<Enrol>) -> Answer<Certificate> {
    let another = "`godwit host token NAME` makes another";
    let unknown = || forbidden("the controller knows no such token", another);
    let secret = Secret::parse(&asked.secret).ok_or_else(unknown)?;
    let whom = Identity::node(asked.name.as_str()).map_err(|e| invalid(e.to_string()))?;
    let _deciding = c.decide();
    let mut record: TokenRecord = c.store.read(Kind::Enrolment, secret.hash())?.ok_or_else(unknown)?;
    if record.name != asked.name {
        let (its, name) = (&record.name, &asked.name);
        return Err(forbidden(format!("the token is for the host `{its}`, not for `{name}`"), another));
    }
    if record.spent_unix_s.is_some() {
        let message = format!("the token of `{}` has been used already, or its host was revoked since", record.name);
        let remedy = "if it was not you, `godwit host revoke` its certificate; `godwit host token NAME` makes another";
        return Err(forbidden(message, remedy));
    }
    let now = now_s();
    if now >= record.expires_unix_s {
        return Err(forbidden(format!("the token of `{}` has expired", record.name), another));
    }
    // A request that cannot be signed spends nothing; whoever has the secret may try again.
    let certificate = sign(&c, &asked.request, &whom)?;
    record.spent_unix_s = Some(now);
    c.store.commit(&[Change::put(Kind::Enrolment, secret.hash(), &record)])?;
    tracing::info!(host = %record.name, "a host has enrolled");
    Ok(Json(certificate))
}

pub async fn renew(
    State(c): Shared,
    Extension(shown): Extension<PeerCertificate>,
    Json(asked): Json<Renew>,
) -> Answer<Certificate> {
    let who = &shown.identity;
    godwit_api::require(who, Role::Node)?;
    let _deciding = c.decide();
    // Once more: it may have been revoked while the request came, and what is signed now begins after that.
    c.credentials().accepts(&shown).map_err(|e| ApiError::new(Problem::Forbidden, e.to_string()))?;
    let certificate = sign(&c, &asked.request, who)?;
    tracing::info!(%who, "a certificate was renewed");
    Ok(Json(certificate))
}

/// Spends the tokens that a node could still enrol with.
fn unspent(c: &Controller, whom: &Identity) -> Result<Vec<Change>, ApiError> {
    let (now, mut changes) = (now_s(), vec![]);
    if whom.role() != Role::Node {
        return Ok(changes);
    }
    for (hash, bytes) in c.store.list(Kind::Enrolment)? {
        // One that cannot be read cannot be enrolled with either.
        let Ok(record) = serde_json::from_slice::<TokenRecord>(&bytes) else { continue };
        if record.name.as_str() == whom.name() && record.spent_unix_s.is_none() {
            changes.push(Change::put(Kind::Enrolment, hash, &TokenRecord { spent_unix_s: Some(now), ..record }));
        }
    }
    Ok(changes)
}

fn void(c: &Arc<Controller>, whom: Identity) -> Result<Revocations, ApiError> {
    if &whom == c.credentials().identity() {
        return Err(conflict(format!("{whom} is this controller: nobody would believe it any more"))
            .remedy("install another controller first, with a name of its own"));
    }
    let list = {
        let _deciding = c.decide();
        let list = stored(c)?.revoke(whom.clone(), SystemTime::now()).map_err(failed)?;
        let mut changes = unspent(c, &whom)?;
        changes.push(Change::put(Kind::Revocation, LIST, &list));
        c.store.commit(&changes)?;
        c.credentials().revoke(list.clone()).map_err(failed)?;
        list
    };
    tracing::warn!(%whom, version = list.version, "revoked");
    if whom.role() == Role::Node
        && let Ok(name) = whom.name().parse()
    {
        // Its connections with a certificate that was good until now.
        c.forget_client(&name);
    }
    let telling = Arc::clone(c);
    c.spawn(async move { tell(&telling).await });
    Ok(list)
}

pub async fn revoke_host(State(c): Shared, Path(name): Path<Name>) -> Answer<Revocations> {
    // Whether it is a host still, or not any more: its certificate may be about all the same.
    let whom = Identity::node(name.as_str()).map_err(|e| invalid(e.to_string()))?;
    Ok(Json(void(&c, whom)?))
}

pub async fn revoke(State(c): Shared, Json(asked): Json<Revoke>) -> Answer<Revocations> {
    Ok(Json(void(&c, asked.identity)?))
}

pub async fn revocations(State(c): Shared) -> Answer<Revocations> {
    Ok(Json(c.credentials().revocations()))
}

/// Tells every node the list of revocations that goes by an older one. Each says itself which that is: it may have been made anew, or brought back
/// from a copy, since it was told. Once more and again: [`tend`].
async fn tell(c: &Arc<Controller>) {
    let list = Arc::new(c.credentials().revocations());
    if list.version == 0 {
        return;
    }
    let Ok(hosts) = c.hosts() else { return };
    let mut telling = tokio::task::JoinSet::new();
    for host in hosts {
        let (node, list) = (c.node(&host), Arc::clone(&list));
        telling.spawn(async move {
            let told = match node.facts().await {
                Ok(facts) if facts.revocations >= list.version => Ok(()),
                Ok(_) => node.revoke(&list).await,
                Err(error) => Err(error),
            };
            // As a node that is revoked itself, and that need not know.
            if let Err(error) = told {
                tracing::debug!(host = %host.name, %error, "it does not know yet who is revoked");
            }
        });
    }
    while telling.join_next().await.is_some() {}
}

/// What has to be done again and again: nodes hear of revocations, and our own certificate is exchanged in time.
pub async fn tend(c: &Arc<Controller>) {
    tell(c).await;
    if let Some(issuer) = c.trust().issuer.get()
        && SystemTime::now() >= c.credentials().renew_at()
        && let Err(error) = renew_own(c, issuer)
    {
        tracing::error!(%error, "the controller's own certificate cannot be renewed; trying again");
    }
}

fn renew_own(c: &Controller, issuer: &Issuer) -> Result<(), TrustError> {
    let credentials: &Credentials = c.credentials();
    let request = KeyRequest::new(credentials.identity())?;
    let validity = Validity::lasting(issuer.life);
    let cert = issuer.authority.sign(&request.request_pem, credentials.identity(), validity)?;
    credentials.renew(&issuer.credentials, &cert, &request.key_pem)?;
    tracing::info!("the controller's own certificate was renewed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::controller;
    use godwit_trust::CLOCK_SKEW;

    /// A controller that issues certificates, and what goes with it.
    fn issuing() -> (tempfile::TempDir, Arc<Controller>) {
        let (folder, c) = controller();
        let authority = Authority::open(&folder.path().join("ca")).unwrap();
        let (life, credentials) = (Duration::from_secs(3600), folder.path().join("controller"));
        c.trust().issue_with(Issuer { authority, life, credentials });
        (folder, c)
    }

    async fn token_of(c: &Arc<Controller>, host: &str) -> EnrolmentToken {
        let new = NewToken { ttl_s: 3600 };
        let given = token(State(Arc::clone(c)), Path(host.parse().unwrap()), Json(new)).await.unwrap();
        given.0.token.parse().unwrap()
    }

    async fn enrol_with(c: &Arc<Controller>, token: &EnrolmentToken) -> Answer<Certificate> {
        let request = KeyRequest::new(&token.identity).unwrap().request_pem;
        let (name, secret) = (token.identity.name().parse().unwrap(), token.secret.reveal().to_owned());
        enrol(State(Arc::clone(c)), Json(Enrol { name, secret, request })).await
    }

    #[tokio::test]
    async fn whoever_is_revoked_while_its_request_comes_is_not_issued_another_certificate() {
        let (_folder, c) = issuing();
        let identity = Identity::node("a").unwrap();
        let now = SystemTime::now();
        let shown = PeerCertificate {
            identity: identity.clone(),
            from: now - CLOCK_SKEW,
            until: now + Duration::from_secs(3600),
        };
        let ask = || {
            let request = KeyRequest::new(&identity).unwrap().request_pem;
            renew(State(Arc::clone(&c)), Extension(shown.clone()), Json(Renew { request }))
        };
        assert!(ask().await.is_ok());
        void(&c, Identity::node("b").unwrap()).unwrap();
        assert!(ask().await.is_ok());
        void(&c, identity.clone()).unwrap();
        let error = ask().await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden);
        assert!(error.message.contains("revoked"), "{error}");
    }

    #[tokio::test]
    async fn a_token_that_was_not_used_is_no_good_once_its_host_is_revoked() {
        let (_folder, c) = issuing();
        let (mine, others) = (token_of(&c, "a").await, token_of(&c, "b").await);
        void(&c, Identity::node("a").unwrap()).unwrap();
        let error = enrol_with(&c, &mine).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden);
        assert!(error.message.contains("revoked"), "{error}");
        assert!(enrol_with(&c, &others).await.is_ok());
        // The way back, for an operator who wants it there again.
        let again = token_of(&c, "a").await;
        assert!(enrol_with(&c, &again).await.is_ok());
    }
}
