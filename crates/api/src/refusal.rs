//! One shape for every refusal: what is wrong, where, and what to do.
//!
//! Handlers, axum's extractors and its router refuse requests in their own ways: as an [`ApiError`], as plain text, or with
//! no body. [`explain`] turns all of them into an [`ApiError`] with its place and a remedy, and keeps the HTTP status where
//! that says more than the kind of problem does (405, 413, 415).

use crate::server::{MAX_BODY, MAX_HEAD};
use crate::{ApiError, Problem};
use axum::Json;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// How axum begins what it says of a body that is JSON of another shape, and of one that is no JSON.
const BODY: [&str; 2] =
    ["Failed to deserialize the JSON body into the target type: ", "Failed to parse the request body as JSON: "];

/// What to do, where whoever refused did not say.
const SEE_DOCUMENT: &str = "see `GET /v1/openapi.json`, or `godwit api spec`, for what it takes";

/// Makes every answer that is not a success an [`ApiError`] that says what, where, and what to do.
pub(crate) async fn explain(request: Request, next: Next) -> Response {
    let place = format!("{} {}", request.method(), request.uri().path());
    let response = next.run(request).await;
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        return response;
    }
    let allow = response.headers().get(header::ALLOW).cloned();
    // Refusals are short: a longer one is cut, and then is no JSON any more.
    let said = to_bytes(response.into_body(), MAX_HEAD).await.unwrap_or_default();
    let (status, error) = match serde_json::from_slice::<ApiError>(&said) {
        Ok(error) => (status, error),
        Err(_) => translate(status, &place, &String::from_utf8_lossy(&said)),
    };
    let mut answer = (status, Json(complete(error, &place))).into_response();
    if let Some(allow) = allow {
        answer.headers_mut().insert(header::ALLOW, allow);
    }
    answer
}

/// Fills in what is missing.
fn complete(mut error: ApiError, place: &str) -> ApiError {
    error.place = error.place.or_else(|| Some(place.to_owned()));
    error.remedy = error.remedy.or_else(|| {
        let remedy = match error.problem {
            Problem::Invalid => SEE_DOCUMENT,
            Problem::Forbidden => "ask with a certificate that may do this",
            Problem::NotFound => "list what there is with the same path without the last part",
            Problem::Conflict | Problem::Blocked => "change what is in the way, and ask again",
            Problem::Failed => "see the log of whoever answered; if it stays so, this is a bug",
            Problem::Unreachable => "see that the other part runs and can be reached, and ask again",
        };
        Some(remedy.to_owned())
    });
    error
}

/// An [`ApiError`] for what axum says in plain text, with the status that it is to have.
fn translate(status: StatusCode, place: &str, text: &str) -> (StatusCode, ApiError) {
    let invalid = |message: String| ApiError::new(Problem::Invalid, format!("{place}: {message}"));
    match status {
        StatusCode::NOT_FOUND => {
            let error = ApiError::new(Problem::NotFound, format!("{place}: the API has no such path"));
            (status, error.remedy(SEE_DOCUMENT))
        }
        StatusCode::METHOD_NOT_ALLOWED => {
            let error = ApiError::new(Problem::NotFound, format!("{place}: the path does not take this method"));
            (status, error.remedy("the answer's header `Allow` names those that it takes"))
        }
        StatusCode::PAYLOAD_TOO_LARGE => {
            let error = invalid(format!("the body is longer than {MAX_BODY} bytes"));
            (status, error.remedy("send less: nothing that the API takes is as long"))
        }
        StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            (status, invalid(text.to_owned()).remedy("send JSON, with `Content-Type: application/json`"))
        }
        s if s.is_client_error() => {
            // 422 is for what stands in the way of a move; a body that cannot be read is as wrong as any other.
            let mut error = invalid(text.to_owned());
            if let Some(what) = BODY.iter().find_map(|beginning| text.strip_prefix(beginning)) {
                let (field, _) = what.split_once(": ").unwrap_or((what, ""));
                let is_path = !field.contains(' ') && !what.starts_with("missing");
                let within = if is_path { format!("body, {field}") } else { "body".to_owned() };
                error.message = format!("{place}: {what}");
                error.place = Some(format!("{place}: {within}"));
            }
            (StatusCode::BAD_REQUEST, error)
        }
        s => (s, ApiError::new(Problem::Failed, format!("{place}: {text}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::public::CreateVm;
    use axum::Router;
    use axum::body::Body;
    use axum::extract::{DefaultBodyLimit, Path};
    use axum::http::Method;
    use axum::middleware::from_fn;
    use axum::routing::{get, post};
    use tower::ServiceExt;

    /// What a server says: status, and the error.
    async fn ask(method: Method, path: &str, content: Option<&str>, body: impl Into<Body>) -> (u16, ApiError) {
        let router = Router::new()
            .route("/v1/vms", post(|Json(_): Json<CreateVm>| async {}))
            .route("/v1/moves/{id}", get(|Path(_): Path<u64>| async {}))
            .route("/v1/broken", get(|| async { (StatusCode::INTERNAL_SERVER_ERROR, "oh") }))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .layer(from_fn(explain));
        let mut request = Request::builder().method(method).uri(path);
        if let Some(content) = content {
            request = request.header(header::CONTENT_TYPE, content);
        }
        let answer = router.oneshot(request.body(body.into()).unwrap()).await.unwrap();
        let (status, allow) = (answer.status().as_u16(), answer.headers().contains_key(header::ALLOW));
        assert_eq!(allow, status == 405);
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
        (status, serde_json::from_slice(&to_bytes(answer.into_body(), MAX_HEAD).await.unwrap()).unwrap())
    }

    #[tokio::test]
    async fn whatever_is_wrong_with_a_request_it_is_told_what_where_and_what_to_do() {
        let json = Some("application/json");
        let vm =
            |disks: &str| format!(r#"{{"name": "web", "at": "ohio", "spec": {{"memory": 4096, "disks": {disks}}}}}"#);
        let (not_json, wrong, unknown) = ("{".to_owned(), vm(r#"[{"volume": "a", "size": "1"}]"#), vm(r#"[], "x": 1"#));
        let long = " ".repeat(MAX_BODY + 1);
        let (post, get) = (Method::POST, Method::GET);
        let v1 = "POST /v1/vms";
        for (method, path, content, body, status, message, place) in [
            (&post, "/v1/vms", json, not_json, 400, "EOF while parsing", format!("{v1}: body")),
            (&post, "/v1/vms", json, wrong, 400, "expected u64", format!("{v1}: body, spec.disks[0].size")),
            (&post, "/v1/vms", json, unknown, 400, "unknown field `x`", format!("{v1}: body, spec.x")),
            (&post, "/v1/vms", json, "{}".into(), 400, "missing field `name`", format!("{v1}: body")),
            (&post, "/v1/vms", json, long, 413, "longer than 1048576 bytes", v1.into()),
            (&post, "/v1/vms", Some("text/plain"), "{}".into(), 415, "Content-Type", v1.into()),
            (&post, "/v1/vms", None, "{}".into(), 415, "Content-Type", v1.into()),
            (&get, "/v1/vms", None, String::new(), 405, "does not take this method", "GET /v1/vms".into()),
            (&get, "/v1/nothing", None, String::new(), 404, "no such path", "GET /v1/nothing".into()),
            (&get, "/v1/moves/x", None, String::new(), 400, "Cannot parse", "GET /v1/moves/x".into()),
            (&get, "/v1/broken", None, String::new(), 500, "oh", "GET /v1/broken".into()),
        ] {
            let (got, error) = ask(method.clone(), path, content, body).await;
            assert_eq!(got, status, "{error:?}");
            assert!(error.message.contains(message), "{error:?}");
            assert_eq!(error.place.as_ref(), Some(&place), "{error:?}");
            assert!(error.remedy.is_some_and(|remedy| !remedy.is_empty()));
        }
    }

    #[test]
    fn a_body_that_cannot_be_read_is_refused_with_the_place_in_it() {
        let text = format!("{}disks[0].size: invalid type: string", BODY[0]);
        let (status, error) = translate(StatusCode::UNPROCESSABLE_ENTITY, "POST /v1/vms", &text);
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert_eq!(error.problem, Problem::Invalid);
        assert_eq!(error.place.as_deref(), Some("POST /v1/vms: body, disks[0].size"));
        assert_eq!(error.message, "POST /v1/vms: disks[0].size: invalid type: string");
    }

    #[test]
    fn what_a_handler_says_is_kept_and_what_it_does_not_say_is_filled_in() {
        let said = ApiError::new(Problem::Conflict, "no").remedy("do");
        let full = complete(said.clone(), "GET /x");
        assert_eq!((full.message, full.remedy, full.place.as_deref()), (said.message, said.remedy, Some("GET /x")));
        for problem in [Problem::Invalid, Problem::Forbidden, Problem::NotFound, Problem::Failed, Problem::Unreachable]
        {
            assert!(complete(ApiError::new(problem, "no"), "GET /x").remedy.is_some());
        }
    }
}
