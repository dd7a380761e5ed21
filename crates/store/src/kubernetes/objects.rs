//! Objects of any kind by their path, as they are: what an installation consists of.

use http::header::CONTENT_TYPE;
use std::time::Duration;

use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::Instant;

use super::APPLY_PATCH;
use super::client::{Kubernetes, describe, request};

const STRATEGIC_PATCH: HeaderValue = HeaderValue::from_static("application/strategic-merge-patch+json");
/// How long to wait for an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The delay before a request is repeated because the API server is too busy.
const BUSY_INTERVAL: Duration = Duration::from_millis(500);

/// Why a request for an object failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ObjectError {
    /// There is no such object, or no such kind.
    #[error("{path} does not exist")]
    NotFound {
        /// The path.
        path: String,
    },
    /// The API server rejects the request.
    #[error("{message} ({code})")]
    Rejected {
        /// The HTTP status.
        code: u16,
        /// The reason of the API server, which names the object.
        message: String,
    },
    /// The API server does not answer.
    #[error("{0}")]
    Unavailable(String),
}

impl Kubernetes {
    /// The object or list at this path.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn get_path(&self, path: &str) -> Result<Value, ObjectError> {
        self.send_path(request(Method::GET, path, Vec::new())).await
    }

    /// Applies an object with server-side apply, as the owner of its fields.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn apply_path(&self, path: &str, manager: &str, object: &Value) -> Result<Value, ObjectError> {
        let path = format!("{path}?fieldManager={manager}&force=true");
        let mut request = request(Method::PATCH, &path, object.to_string().into_bytes());
        request.headers_mut().insert(CONTENT_TYPE, APPLY_PATCH);
        self.send_path(request).await
    }

    /// Changes fields of an object; `null` removes one.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn merge_path(&self, path: &str, fields: &Value) -> Result<Value, ObjectError> {
        let mut request = request(Method::PATCH, path, fields.to_string().into_bytes());
        request.headers_mut().insert(CONTENT_TYPE, super::publish::MERGE_PATCH);
        self.send_path(request).await
    }

    /// Changes fields of an object of Kubernetes' own kinds; lists are merged by their keys, such as the type of a condition.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn strategic_path(&self, path: &str, fields: &Value) -> Result<Value, ObjectError> {
        let mut request = request(Method::PATCH, path, fields.to_string().into_bytes());
        request.headers_mut().insert(CONTENT_TYPE, STRATEGIC_PATCH);
        self.send_path(request).await
    }

    /// Deletes the object or the collection at this path, and what it owns first. Returns whether there was one.
    ///
    /// # Errors
    /// See [`ObjectError`].
    pub async fn delete_path(&self, path: &str) -> Result<bool, ObjectError> {
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"});
        match self.send_path(request(Method::DELETE, path, options.to_string().into_bytes())).await {
            Ok(_) => Ok(true),
            Err(ObjectError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends a request, and repeats it while the API server is too busy, for instance just after its start. Each of these
    /// requests can be repeated.
    pub(super) async fn send_path(&self, request: Request<Vec<u8>>) -> Result<Value, ObjectError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        loop {
            match self.send_once(request.clone()).await {
                Err(ObjectError::Rejected { code: 429, .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(BUSY_INTERVAL).await;
                }
                result => return result,
            }
        }
    }

    pub(super) async fn send_once(&self, request: Request<Vec<u8>>) -> Result<Value, ObjectError> {
        let path = request.uri().path().to_owned();
        let unavailable = |problem: String| ObjectError::Unavailable(format!("{}: {problem}", self.server()));
        let answer = async {
            let response = self.client().send(request.map(Body::from)).await;
            let response = response.map_err(|error| unavailable(describe(&error)))?;
            let status = response.status();
            let bytes = response.into_body().collect().await;
            let bytes = bytes.map_err(|error| unavailable(describe(&error)))?.to_bytes();
            Ok((status, bytes))
        };
        let late = |_| Err(unavailable(format!("no answer in {} s", CALL_TIMEOUT.as_secs())));
        let (status, bytes) = tokio::time::timeout(CALL_TIMEOUT, answer).await.unwrap_or_else(late)?;
        let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if status.is_success() {
            return Ok(value);
        }
        if status == StatusCode::NOT_FOUND {
            return Err(ObjectError::NotFound { path });
        }
        let message = value["message"].as_str().map(str::to_owned);
        let message =
            message.unwrap_or_else(|| format!("{path}: {}", String::from_utf8_lossy(&bytes).trim()));
        // Of an eviction, only the causes name the budget.
        let causes = value["details"]["causes"].as_array().into_iter().flatten();
        let causes = causes.filter_map(|cause| cause["message"].as_str().map(str::to_owned));
        let message = match status {
            StatusCode::TOO_MANY_REQUESTS => {
                std::iter::once(message).chain(causes).collect::<Vec<_>>().join(" ")
            }
            _ => message,
        };
        Err(ObjectError::Rejected { code: status.as_u16(), message })
    }
}
