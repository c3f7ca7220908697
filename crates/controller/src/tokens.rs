//! Tokens with which people and programs of a trust domain ask the API.
//!
//! A token is shown once, when it is made; the store has its hash. It lasts until it ends or is removed. It goes in a header of a request
//! over TLS 1.3, to a server that the token's own fingerprint of the CA proves: to nobody else.

use crate::rights::Caller;
use crate::state::{Controller, conflict, invalid, missing};
use crate::store::{Change, Kind};
use axum::Json;
use axum::extract::{Path, State};
use godwit_api::trust::{ApiToken, NewApiToken, Token};
use godwit_api::{ApiError, Name, Problem, done};
use godwit_trust::{AccessToken, Secret};
use serde_json::Value;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// Tokens that are kept at most: each request with one looks it up by its hash, and a list shows them all.
const MOST: usize = 10_000;

/// The longest that one lasts, seconds.
const LONGEST_S: u64 = 366 * 24 * 3600;

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

pub async fn create(State(c): Shared, Json(new): Json<NewApiToken>) -> Answer<Token> {
    if new.ttl_s == 0 || new.ttl_s > LONGEST_S {
        return Err(invalid("a token lasts at least a second, and a year at the most"));
    }
    let failed = |e: godwit_trust::TrustError| ApiError::new(Problem::Failed, e.to_string());
    let authority = c.credentials().ca_fingerprint();
    let token = AccessToken { name: new.name.to_string(), authority, secret: Secret::new().map_err(failed)? };
    let expires_unix_s = now_s() + new.ttl_s;
    let record = ApiToken { name: new.name, domain: new.domain, role: new.role, expires_unix_s };
    let _deciding = c.decide();
    let known: Vec<ApiToken> = c.store.read_all(Kind::ApiToken)?;
    if known.iter().any(|token| token.name == record.name) {
        let remedy = format!("`godwit token rm {}` first", record.name);
        return Err(conflict(format!("there is a token `{}` already", record.name)).remedy(remedy));
    }
    if known.len() >= MOST {
        return Err(conflict(format!("there are {MOST} tokens")).remedy("remove some that nobody uses"));
    }
    c.store.commit(&[Change::put(Kind::ApiToken, token.secret.hash(), &record)])?;
    tracing::info!(token = %record.name, domain = %record.domain, role = %record.role, "a token was made");
    Ok(Json(Token { token: token.reveal(), expires_unix_s }))
}

pub async fn list(State(c): Shared) -> Answer<Vec<ApiToken>> {
    let mut tokens: Vec<ApiToken> = c.store.read_all(Kind::ApiToken)?;
    tokens.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(tokens))
}

pub async fn remove(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let _deciding = c.decide();
    for (hash, bytes) in c.store.list(Kind::ApiToken)? {
        if serde_json::from_slice::<ApiToken>(&bytes).is_ok_and(|token| token.name == name) {
            c.store.commit(&[Change::remove(Kind::ApiToken, hash)])?;
            return Ok(done());
        }
    }
    Err(missing("token", name))
}

/// Who has a token.
///
/// # Errors
/// [`Problem::Forbidden`]; the words never hold any of it.
pub fn caller(c: &Controller, text: &str) -> Result<Caller, ApiError> {
    let bad =
        |why: &str| ApiError::new(Problem::Forbidden, why).remedy("an admin makes another: `godwit token create`");
    let unknown = || bad("the controller knows no such token");
    let token: AccessToken = text.parse().map_err(|_| unknown())?;
    let hash = token.secret.hash();
    let record: ApiToken = c.store.read(Kind::ApiToken, &hash)?.ok_or_else(unknown)?;
    if now_s() >= record.expires_unix_s {
        return Err(bad("the token has expired"));
    }
    Ok(Caller::of_domain(&record.name, record.domain, record.role).by_token(hash))
}

/// Whether the token that a store knows by this hash is good still: for answers that go on for long.
#[must_use]
pub fn is_good(c: &Controller, hash: &str) -> bool {
    let record = c.store.read::<ApiToken>(Kind::ApiToken, hash);
    record.ok().flatten().is_some_and(|record| now_s() < record.expires_unix_s)
}
