//! The answers of the API server: rejections as errors of the store, and the lines of a watch as events.

use std::time::Duration;

use serde_json::Value;
use tortie_api::{Key, Kind, Position};

use super::group::CalicoGroup;
use super::trim;
use super::values::{self, Decoded};
use crate::StoreError;
use crate::follow::Event;

/// How long to wait if the API server limits the rate and does not say how long.
const DEFAULT_RETRY: Duration = Duration::from_secs(1);

/// What a request was for, for errors.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    /// `get`, `list`, as in RBAC.
    pub(crate) verb: &'static str,
    pub(crate) kind: Kind,
    pub(crate) key: Option<Key>,
    /// Where a watch begins.
    pub(crate) after: Position,
    /// The group of Calico's kinds.
    pub(crate) group: CalicoGroup,
}

/// An answer that is no success.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rejection {
    pub(crate) code: u16,
    pub(crate) retry_after: Option<Duration>,
    /// The `Status` object, or `Null` if the answer is something else.
    pub(crate) status: Value,
    /// The whole answer.
    pub(crate) text: String,
}

/// The error of a rejected operation at this server.
pub(crate) fn error(operation: &Operation, rejection: &Rejection, server: &str) -> StoreError {
    let Rejection { code, retry_after, status, text } = rejection;
    let message = status["message"].as_str().unwrap_or(text.trim());
    let target = match &operation.key {
        Some(key) => key.to_string(),
        None => operation.kind.plural().to_owned(),
    };
    let described = format!("{server}: {} {target}: {message} ({code})", operation.verb);
    let details = &status["details"];
    let is_namespace = details["kind"] == "namespaces" && operation.kind != Kind::Namespace;
    match (code, &operation.key) {
        (404, Some(key)) if is_namespace => {
            StoreError::Invalid { key: key.clone(), problem: message.to_owned() }
        }
        // Without a CustomResourceDefinition, the answer is a plain text.
        (404, Some(key)) if details["name"].as_str().is_some_and(|name| !name.is_empty()) => {
            StoreError::NotFound(key.clone())
        }
        (404, _) => StoreError::KindAbsent(operation.kind),
        (409, Some(key)) if status["reason"] == "AlreadyExists" => StoreError::AlreadyExists(key.clone()),
        (409, Some(key)) => StoreError::Conflict(key.clone()),
        (410, _) => StoreError::Compacted(operation.after),
        (401 | 403, _) => StoreError::Forbidden(described),
        // A patch of an object that has been deleted and created again.
        (422, Some(key)) if details["causes"][0]["field"] == "metadata.uid" => {
            StoreError::Conflict(key.clone())
        }
        (400 | 413 | 422, Some(key)) => StoreError::Invalid { key: key.clone(), problem: message.to_owned() },
        (429, _) => StoreError::Throttled(retry_after.unwrap_or(DEFAULT_RETRY)),
        _ => StoreError::Unavailable(described),
    }
}

/// The event of a line of a watch.
pub(crate) fn event(operation: &Operation, line: &[u8], server: &str) -> Result<Event, StoreError> {
    let kind = operation.kind;
    let mut line: Value = match trim::read(trim::of_line(kind), line) {
        Ok(line) => line,
        Err(error) => {
            let problem = format!("{server}: the watch of {} has an invalid line: {error}", kind.plural());
            return Err(StoreError::Unavailable(problem));
        }
    };
    let object = line.get_mut("object").map(Value::take).unwrap_or_default();
    match line["type"].as_str().unwrap_or_default() {
        "ADDED" | "MODIFIED" => values::decode(operation.group, kind, object).map(Decoded::event),
        "DELETED" => values::decode(operation.group, kind, object).map(Decoded::deleted),
        "BOOKMARK" => values::position(object.get("metadata")).map(Event::Progress),
        "ERROR" => {
            let code = object["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(500);
            let text = object.to_string();
            let rejection = Rejection { code, retry_after: None, status: object, text };
            Err(error(operation, &rejection, server))
        }
        other => {
            let problem = format!("{server}: the watch of {} has an event of type {other:?}", kind.plural());
            Err(StoreError::Unavailable(problem))
        }
    }
}

/// Splits the bytes of a watch into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that these bytes complete.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let mut parts = bytes.split(|byte| *byte == b'\n').peekable();
        while let Some(part) = parts.next() {
            self.rest.extend_from_slice(part);
            if parts.peek().is_some() {
                let line = std::mem::take(&mut self.rest);
                lines.extend((!line.is_empty()).then_some(line));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Stored, Written};

    const SERVER: &str = "https://server";

    fn operation(verb: &'static str, key: Option<Key>) -> Operation {
        Operation { verb, kind: Kind::Tier, key, after: Position(7), group: CalicoGroup::Crd }
    }

    fn rejection(code: u16, status: Value) -> Rejection {
        Rejection { code, retry_after: None, text: status.to_string(), status }
    }

    #[test]
    fn rejections_are_errors_of_the_store() {
        let key = || Key::global(Kind::Tier, "t");
        let message = "tiers.crd.projectcalico.org is forbidden: User \"u\" cannot create resource \"tiers\"";
        let invalid = |problem: &str| StoreError::Invalid { key: key(), problem: problem.to_owned() };
        let table = [
            (404, json!({"details": {"name": "t", "kind": "tiers"}}), StoreError::NotFound(key())),
            (404, json!(null), StoreError::KindAbsent(Kind::Tier)),
            (
                404,
                json!({"message": "namespaces \"n\" not found", "details": {"name": "n", "kind": "namespaces"}}),
                invalid("namespaces \"n\" not found"),
            ),
            (409, json!({"reason": "AlreadyExists"}), StoreError::AlreadyExists(key())),
            (409, json!({"reason": "Conflict"}), StoreError::Conflict(key())),
            (410, json!({"reason": "Expired"}), StoreError::Compacted(Position(7))),
            (
                403,
                json!({"message": message}),
                StoreError::Forbidden(format!("{SERVER}: create Tier t: {message} (403)")),
            ),
            (422, json!({"message": "spec.order: wrong"}), invalid("spec.order: wrong")),
            (422, json!({"details": {"causes": [{"field": "metadata.uid"}]}}), StoreError::Conflict(key())),
            (400, json!({"message": "spec.order: wrong"}), invalid("spec.order: wrong")),
            (429, json!({}), StoreError::Throttled(DEFAULT_RETRY)),
            (
                503,
                json!({"message": "no leader"}),
                StoreError::Unavailable(format!("{SERVER}: create Tier t: no leader (503)")),
            ),
        ];
        for (code, status, expected) in table {
            let error = error(&operation("create", Some(key())), &rejection(code, status), SERVER);
            assert_eq!(error, expected);
        }
        let throttled = Rejection { retry_after: Some(Duration::from_secs(9)), ..rejection(429, json!({})) };
        let result = error(&operation("list", None), &throttled, SERVER);
        assert_eq!(result, StoreError::Throttled(Duration::from_secs(9)));
        let result =
            error(&operation("list", None), &rejection(401, json!({"message": "Unauthorized"})), SERVER);
        assert_eq!(result, StoreError::Forbidden(format!("{SERVER}: list tiers: Unauthorized (401)")));
    }

    #[test]
    fn lines_are_events() {
        let operation = operation("watch", None);
        let object = json!({"metadata": {"name": "t", "resourceVersion": "9"}});
        let event = |line: &Value| event(&operation, line.to_string().as_bytes(), SERVER);
        let value = json!({"apiVersion": "projectcalico.org/v3", "kind": "Tier", "metadata": {"name": "t"}});
        let stored = Stored::new(Key::global(Kind::Tier, "t"), value, Written::at(9));
        let deleted = Event::Deleted { key: stored.key.clone(), position: Position(9) };
        let table = [
            ("ADDED", &object, Ok(Event::Put(stored.clone()))),
            ("MODIFIED", &object, Ok(Event::Put(stored))),
            ("DELETED", &object, Ok(deleted)),
            ("BOOKMARK", &object, Ok(Event::Progress(Position(9)))),
            ("ERROR", &json!({"code": 410}), Err(StoreError::Compacted(Position(7)))),
        ];
        for (name, object, expected) in table {
            assert_eq!(event(&json!({"type": name, "object": object})), expected);
        }
        for line in [json!({"type": "NEW", "object": {}}), json!({"type": "ERROR", "object": {}}), json!([])]
        {
            assert!(matches!(event(&line), Err(StoreError::Unavailable(_))), "{line}");
        }
    }

    #[test]
    fn bytes_are_split_at_line_ends() {
        let mut lines = Lines::default();
        let table: [(&[u8], &[&[u8]]); 5] =
            [(b"a", &[]), (b"b\nc\n\nd", &[b"ab", b"c"]), (b"", &[]), (b"\n", &[b"d"]), (b"\n", &[])];
        for (bytes, expected) in table {
            assert_eq!(lines.push(bytes), expected);
        }
    }
}
