//! Follows single Secrets. A Role can allow this for one name (`resourceNames`), because list and watch select the object by
//! the field `metadata.name`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::BoxStream;
use http::Method;
use http_body_util::BodyExt;
use k8s_openapi::ByteString;
use kube::client::Body;
use serde_json::Value;

use super::answer::Lines;
use super::client::{Kubernetes, describe, request};
use super::objects::ObjectError;
use super::resources;
use crate::backoff::{Backoff, random_seed};
use crate::secrets::{SecretData, SecretState, Secrets};

/// The maximum delay after an error. Somebody may have granted the permission meanwhile.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// After this time, the API server ends a watch.
const WATCH_SECONDS: u32 = 300;
/// A watch that ends earlier counts as a failure, so that a server or proxy that ends each at once is not asked all the time.
const SHORT: Duration = Duration::from_secs(1);
/// How long a watch may be silent: it has bookmarks each minute.
const SILENCE: Duration = Duration::from_secs(90);
/// How long to wait until a watch is opened.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

impl Secrets for Kubernetes {
    fn namespace(&self) -> &str {
        self.client().default_namespace()
    }

    fn follow_secret(&self, name: &str) -> BoxStream<'static, SecretState> {
        let namespace = resources::escape(self.namespace());
        let following = SecretFollower {
            path: format!(
                "/api/v1/namespaces/{namespace}/secrets?fieldSelector=metadata.name%3D{}",
                resources::escape(name)
            ),
            client: self.clone(),
            name: name.to_owned(),
            watch: None,
            began: None,
            has_failed: false,
            backoff: Backoff::new(random_seed()).with_max(MAX_DELAY),
        };
        futures::stream::unfold(following, async |mut following| Some((following.next().await, following)))
            .boxed()
    }
}

struct SecretFollower {
    client: Kubernetes,
    name: String,
    /// The path and the query, to which options can be added.
    path: String,
    watch: Option<SecretWatch>,
    /// When the watch began.
    began: Option<Instant>,
    /// Whether the last attempt failed, so that the next one waits.
    has_failed: bool,
    backoff: Backoff,
}

struct SecretWatch {
    bytes: BoxStream<'static, Result<Vec<u8>, kube::Error>>,
    lines: Lines,
    ready: std::collections::VecDeque<Vec<u8>>,
}

impl SecretFollower {
    /// The next state.
    async fn next(&mut self) -> SecretState {
        if let Some(state) = self.next_of_watch().await {
            return state;
        }
        let was_short = self.began.take().is_some_and(|began| began.elapsed() < SHORT);
        if std::mem::take(&mut self.has_failed) || was_short {
            self.backoff.wait().await;
        }
        match self.read().await {
            Ok(state) => {
                if !was_short {
                    self.backoff.succeeded();
                }
                self.began = Some(Instant::now());
                state
            }
            Err(error) => {
                self.has_failed = true;
                self.refused(error)
            }
        }
    }

    /// Reads the present state, and opens a watch from there.
    async fn read(&mut self) -> Result<SecretState, ObjectError> {
        let list = self.client.get_path(&self.path).await?;
        let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        let watch = format!(
            "{}&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={}",
            self.path,
            resources::escape(version)
        );
        let sent = self.client.client().send(request(Method::GET, &watch, Vec::new()).map(Body::from));
        let sent = tokio::time::timeout(CALL_TIMEOUT, sent).await;
        let unavailable =
            |problem: String| ObjectError::Unavailable(format!("{}: {problem}", self.client.server()));
        let response = sent.map_err(|_| unavailable("the watch does not begin".to_owned()))?;
        let response = response.map_err(|error| unavailable(describe(&error)))?;
        let code = response.status().as_u16();
        if !response.status().is_success() {
            let message = format!("cannot watch the Secret {}", self.name);
            return Err(ObjectError::Rejected { code, message });
        }
        let bytes = response.into_body().into_data_stream().map(|part| part.map(|bytes| bytes.to_vec()));
        self.watch =
            Some(SecretWatch { bytes: bytes.boxed(), lines: Lines::default(), ready: Default::default() });
        Ok(list["items"].as_array().and_then(|items| items.first()).map_or(SecretState::Absent, state_of))
    }

    /// The next change of the watch; `None` without one, and when it ends.
    async fn next_of_watch(&mut self) -> Option<SecretState> {
        let watch = self.watch.as_mut()?;
        loop {
            while let Some(line) = watch.ready.pop_front() {
                match event(&line) {
                    SecretEvent::State(state) => return Some(state),
                    SecretEvent::Bookmark => {}
                    SecretEvent::End => {
                        self.watch = None;
                        return None;
                    }
                }
            }
            match tokio::time::timeout(SILENCE, watch.bytes.next()).await {
                Ok(Some(Ok(bytes))) => watch.ready.extend(watch.lines.push(&bytes)),
                Ok(Some(Err(_)) | None) | Err(_) => {
                    self.watch = None;
                    return None;
                }
            }
        }
    }

    fn refused(&self, error: ObjectError) -> SecretState {
        match error {
            ObjectError::Rejected { code: 401 | 403, message } => SecretState::Forbidden(format!(
                "{message}; a Role must allow get, list and watch of this Secret in namespace {} (tortie install --bgp-secret {})",
                self.client.namespace(),
                self.name
            )),
            error => SecretState::Unavailable(error.to_string()),
        }
    }
}

pub(super) enum SecretEvent {
    State(SecretState),
    Bookmark,
    /// The history is lost, or the line cannot be read: read again.
    End,
}

pub(super) fn event(line: &[u8]) -> SecretEvent {
    let line: Value = serde_json::from_slice(line).unwrap_or_default();
    match line["type"].as_str() {
        Some("ADDED" | "MODIFIED") => SecretEvent::State(state_of(&line["object"])),
        Some("DELETED") => SecretEvent::State(SecretState::Absent),
        Some("BOOKMARK") => SecretEvent::Bookmark,
        _ => SecretEvent::End,
    }
}

fn state_of(object: &Value) -> SecretState {
    let data = match &object["data"] {
        Value::Null => Ok(BTreeMap::new()),
        data => serde_json::from_value::<BTreeMap<String, ByteString>>(data.clone()),
    };
    match data {
        Ok(data) => {
            SecretState::Present(SecretData(data.into_iter().map(|(key, value)| (key, value.0)).collect()))
        }
        Err(error) => SecretState::Unavailable(format!("its data cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_a_watch_are_states_and_data_does_not_appear_in_logs() {
        let data = SecretData([("password".to_owned(), b"meow".to_vec())].into());
        assert!(!format!("{data:?}").contains("meow") && !format!("{data:?}").contains("109"));
        let object = json!({"data": {"password": "bWVvdw=="}});
        let shown = |line: Value| match event(line.to_string().as_bytes()) {
            SecretEvent::State(state) => Some(state),
            SecretEvent::Bookmark => None,
            SecretEvent::End => Some(SecretState::Unavailable("end".to_owned())),
        };
        let end = || Some(SecretState::Unavailable("end".to_owned()));
        let present = |data| Some(SecretState::Present(data));
        for (line, expected) in [
            (json!({"type": "ADDED", "object": object}), present(data.clone())),
            (json!({"type": "MODIFIED", "object": object}), present(data)),
            (json!({"type": "ADDED", "object": {}}), present(SecretData::default())),
            (json!({"type": "DELETED", "object": object}), Some(SecretState::Absent)),
            (json!({"type": "BOOKMARK", "object": object}), None),
            (json!({"type": "ERROR", "object": {"code": 410}}), end()),
            (json!("damaged"), end()),
        ] {
            assert_eq!(shown(line.clone()), expected, "{line}");
        }
        let damaged = shown(json!({"type": "ADDED", "object": {"data": {"k": "%"}}}));
        assert!(matches!(damaged, Some(SecretState::Unavailable(_))), "{damaged:?}");
    }
}
