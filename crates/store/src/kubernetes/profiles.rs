//! Profiles, which Calico derives from Namespaces and ServiceAccounts
//! (`libcalico-go/lib/backend/k8s/conversion/conversion.go`).
//!
//! The two kinds have no common order. A follower's position is the lower one of both, and no barrier contains it: what
//! depends on these profiles depends on the Namespaces and ServiceAccounts themselves.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream;
use serde_json::{Map, Value, json};
use tortie_api::{Key, Kind, Position, Positions};

use super::{Kubernetes, envelope};
use crate::follow::{Change, Follow, follow};
use crate::{Interest, Page, PageToken, Store, StoreError, Stored};

/// The kinds with profiles, in the order of their pages.
const SOURCES: [Kind; 2] = [Kind::Namespace, Kind::ServiceAccount];

impl Kubernetes {
    pub(super) async fn profile(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let Some(source) = source(&key.name) else { return Ok(None) };
        Ok(self.get(&source).await?.map(derive))
    }

    /// The pages of namespaces, then those of service accounts. A token begins with the number of the kind.
    pub(super) async fn profiles_page(
        &self,
        interest: &Interest,
        after: Option<PageToken>,
    ) -> Result<Page, StoreError> {
        let (number, token) = match &after {
            None => (0, None),
            Some(PageToken(token)) => match token.split_at_checked(1) {
                Some(("0", token)) => (0, Some(token)),
                Some(("1", token)) => (1, Some(token)),
                _ => return Err(StoreError::Unavailable(format!("no page begins at {token:?}"))),
            },
        };
        let token = token.filter(|token| !token.is_empty()).map(|token| PageToken(token.to_owned()));
        let page = self.list_page(&Interest::all(SOURCES[number]), token).await?;
        let next = match page.next {
            Some(PageToken(token)) => Some(format!("{number}{token}")),
            None => (number == 0).then(|| "1".to_owned()),
        };
        let items = page.items.into_iter().map(derive);
        let items = items.filter(|stored| interest.covers(&stored.key, &stored.value)).collect();
        Ok(Page { items, position: page.position, next: next.map(PageToken) })
    }

    pub(super) fn follow_profiles(&self, interest: Interest) -> Follow {
        let changes = follow(&Arc::new(self.clone()), SOURCES.map(Interest::all).to_vec());
        let profiles = Profiles { interest, positions: Positions::default(), reached: None };
        let derived = changes.scan(profiles, |profiles, change| {
            let derived = profiles.derive(change);
            async move { Some(stream::iter(derived)) }
        });
        derived.flatten().boxed()
    }
}

/// What a follower of profiles knows.
struct Profiles {
    interest: Interest,
    /// How far each kind is that is in sync.
    positions: Positions,
    /// What was reported, if both kinds are in sync.
    reached: Option<Position>,
}

impl Profiles {
    /// The change of profiles by a change of another object.
    fn derive(&mut self, change: Change) -> Option<Change> {
        match change {
            Change::Put(stored) => {
                let profile = derive(stored);
                self.interest.covers(&profile.key, &profile.value).then_some(Change::Put(profile))
            }
            Change::Gone { key, position } => {
                let key = Key::global(Kind::Profile, name(&key));
                self.interest.covers(&key, &Value::Null).then_some(Change::Gone { key, position })
            }
            Change::InSync(kind, position) | Change::Progress(kind, position) => {
                self.positions.advance(kind, position);
                let both = SOURCES.map(|kind| self.positions.of(kind));
                let [Some(one), Some(other)] = both else { return None };
                let lower = one.min(other);
                match self.reached.replace(lower) {
                    None => Some(Change::InSync(Kind::Profile, lower)),
                    Some(before) => (lower > before).then_some(Change::Progress(Kind::Profile, lower)),
                }
            }
            Change::Restarted(kind) => {
                self.positions.forget(kind);
                self.reached.take().map(|_| Change::Restarted(Kind::Profile))
            }
            Change::Unavailable(kind, error) => {
                self.positions.forget(kind);
                self.reached = None;
                Some(Change::Unavailable(Kind::Profile, error))
            }
        }
    }
}

/// The object of a profile with this name.
fn source(profile: &str) -> Option<Key> {
    if let Some(namespace) = profile.strip_prefix("kns.").filter(|name| !name.is_empty()) {
        return Some(Key::global(Kind::Namespace, namespace));
    }
    // No name of a namespace has a dot.
    let (namespace, name) = profile.strip_prefix("ksa.")?.split_once('.')?;
    (!namespace.is_empty() && !name.is_empty())
        .then(|| Key::namespaced(Kind::ServiceAccount, namespace, name))
}

/// The name of an object's profile.
fn name(source: &Key) -> String {
    match source.kind {
        Kind::Namespace => format!("kns.{}", source.name),
        _ => format!("ksa.{}.{}", source.namespace, source.name),
    }
}

/// The profile that Calico derives from a Namespace, which allows everything, or from a ServiceAccount, which has no rules.
#[must_use]
pub fn profile_of(source: Stored) -> Stored {
    derive(source)
}

fn derive(source: Stored) -> Stored {
    let Stored { key, value, version, position } = source;
    let profile = Key::global(Kind::Profile, name(&key));
    let prefix = if key.kind == Kind::Namespace { "pcns." } else { "pcsa." };
    let own = value["metadata"]["labels"].as_object().into_iter().flatten();
    let mut labels: Map<String, Value> =
        own.map(|(name, value)| (format!("{prefix}{name}"), value.clone())).collect();
    labels.insert(format!("{prefix}projectcalico.org/name"), json!(key.name));
    let mut metadata = json!({"name": profile.name});
    if let Ok(uid @ Value::String(_)) = envelope::transform_uid(&value["metadata"]["uid"]) {
        metadata["uid"] = uid;
    }
    if let created @ Value::String(_) = &value["metadata"]["creationTimestamp"] {
        metadata["creationTimestamp"] = created.clone();
    }
    let mut spec = json!({"labelsToApply": labels});
    if key.kind == Kind::Namespace {
        spec["ingress"] = json!([{"action": "Allow"}]);
        spec["egress"] = json!([{"action": "Allow"}]);
    }
    let value = json!({
        "apiVersion": profile.kind.api_version(),
        "kind": profile.kind.name(),
        "metadata": metadata,
        "spec": spec,
    });
    Stored { key: profile, value, version, position }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Written;

    #[test]
    fn profiles_are_as_calico_derives_them() {
        let metadata = |name: &str| {
            json!({"name": name, "labels": {"a": "b"}, "uid": "00000000-0000-4000-8000-000000000001",
            "creationTimestamp": "2026-01-01T00:00:00Z"})
        };
        let profile = |name: &str, spec: Value| {
            json!({"apiVersion": "projectcalico.org/v3", "kind": "Profile", "spec": spec, "metadata":
                {"name": name, "uid": "00000000-0000-4000-8000-000000000080", "creationTimestamp": "2026-01-01T00:00:00Z"}})
        };
        let allow = json!([{"action": "Allow"}]);
        let table = [
            (
                Key::global(Kind::Namespace, "n"),
                profile(
                    "kns.n",
                    json!({"ingress": allow, "egress": allow,
                        "labelsToApply": {"pcns.a": "b", "pcns.projectcalico.org/name": "n"}}),
                ),
            ),
            (
                Key::namespaced(Kind::ServiceAccount, "n", "s.t"),
                profile(
                    "ksa.n.s.t",
                    json!({"labelsToApply": {"pcsa.a": "b", "pcsa.projectcalico.org/name": "s.t"}}),
                ),
            ),
        ];
        for (key, expected) in table {
            let value = json!({"metadata": metadata(&key.name)});
            let derived = derive(Stored::new(key.clone(), value, Written::at(7)));
            assert_eq!(derived.value, expected);
            assert_eq!(derived.position, Position(7));
            assert_eq!(source(&derived.key.name), Some(key));
        }
        for other in ["", "kns.", "ksa.n", "ksa..s", "ksa.n.", "projectcalico-default-allow"] {
            assert_eq!(source(other), None, "{other}");
        }
    }

    /// A follower has what the slower one of the two kinds has.
    #[test]
    fn a_follower_reports_the_lower_position() {
        let interest = Interest::all(Kind::Profile);
        let mut profiles = Profiles { interest, positions: Positions::default(), reached: None };
        let (one, other) = (Kind::Namespace, Kind::ServiceAccount);
        let in_sync = |position| Change::InSync(Kind::Profile, Position(position));
        let progress = |position| Change::Progress(Kind::Profile, Position(position));
        let table = [
            (Change::InSync(one, Position(7)), None),
            (Change::InSync(other, Position(5)), Some(in_sync(5))),
            (Change::Progress(one, Position(8)), None),
            (Change::Progress(other, Position(6)), Some(progress(6))),
            (Change::Restarted(one), Some(Change::Restarted(Kind::Profile))),
            (Change::Restarted(other), None),
            (Change::InSync(other, Position(9)), None),
            (Change::InSync(one, Position(9)), Some(in_sync(9))),
            (
                Change::Unavailable(one, StoreError::KindAbsent(one)),
                Some(Change::Unavailable(Kind::Profile, StoreError::KindAbsent(one))),
            ),
            (Change::Progress(other, Position(10)), None),
            (Change::InSync(one, Position(12)), Some(in_sync(10))),
        ];
        for (change, expected) in table {
            assert_eq!(profiles.derive(change.clone()), expected, "{change:?}");
        }
    }
}
