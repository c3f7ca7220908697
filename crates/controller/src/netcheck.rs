//! What all hosts find wrong with their parts of the network.

use crate::state::Controller;
use axum::Json;
use axum::extract::State;
use godwit_api::ApiError;
use godwit_api::network::{HostFinding, NetFinding, NetKind};
use std::sync::Arc;

pub async fn list(State(c): State<Arc<Controller>>) -> Result<Json<Vec<HostFinding>>, ApiError> {
    let mut found = vec![];
    for host in c.hosts()? {
        let answer = c.node(&host).network().await;
        let findings = answer.unwrap_or_else(|error| {
            let message = format!("it cannot be asked: {}", error.message);
            vec![NetFinding { kind: NetKind::Host, message }]
        });
        found.extend(findings.into_iter().map(|finding| HostFinding { host: host.name.clone(), finding }));
    }
    Ok(Json(found))
}
