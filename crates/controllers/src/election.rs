//! Leader election by a Lease (`coordination.k8s.io/v1`), as in Kubernetes' own controllers
//! (`k8s.io/client-go/tools/leaderelection`): of several processes, one works.
//!
//! A candidate never compares clocks of two machines. It takes the Lease if it has not seen it change for the Lease's
//! duration. The leader stops some time before that.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tortie_api::Key;
use tortie_store::{Stored, Version};

/// How long a Lease is valid without a renewal.
pub const LEASE: Duration = Duration::from_secs(15);
/// How long a leader works without a renewal.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// How often the leader renews the Lease, and the others look at it.
pub const PERIOD: Duration = Duration::from_secs(2);

/// A candidate.
#[derive(Debug, Clone)]
pub struct Election {
    lease: Key,
    identity: String,
    /// The last change of the Lease that was seen, and when.
    observed: Option<(Version, Instant)>,
    /// When the last successful renewal began.
    renewed: Option<Instant>,
}

/// What a candidate does with the Lease.
#[derive(Debug, Clone, PartialEq)]
pub enum Claim {
    /// Creates it.
    Create(Value),
    /// Replaces this version of it.
    Update(Value, Version),
    /// Nothing: another candidate leads.
    Wait,
}

impl Election {
    /// A candidate with this name, which must be unique.
    #[must_use]
    pub fn new(lease: Key, identity: impl Into<String>) -> Self {
        Self { lease, identity: identity.into(), observed: None, renewed: None }
    }

    /// What to do with the Lease as it is stored. `time` is the time of the wall clock, for people who read the Lease.
    pub fn claim(&mut self, lease: Option<&Stored>, now: Instant, time: &str) -> Claim {
        let Some(stored) = lease else { return Claim::Create(self.renewal(None, time)) };
        let spec = &stored.value["spec"];
        let holder = spec["holderIdentity"].as_str().unwrap_or_default();
        if holder == self.identity || holder.is_empty() {
            return Claim::Update(self.renewal(Some(&stored.value), time), stored.version.clone());
        }
        self.renewed = None;
        let since = match &self.observed {
            Some((version, since)) if *version == stored.version => *since,
            _ => self.observed.insert((stored.version.clone(), now)).1,
        };
        let duration = spec["leaseDurationSeconds"].as_u64().map_or(LEASE, Duration::from_secs);
        if now.saturating_duration_since(since) < duration {
            return Claim::Wait;
        }
        Claim::Update(self.renewal(Some(&stored.value), time), stored.version.clone())
    }

    /// Records that a claim was stored that began at this time.
    pub fn renewed(&mut self, began: Instant) {
        self.renewed = Some(began);
    }

    /// Until when this candidate leads, if it does.
    #[must_use]
    pub fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|renewed| renewed + DEADLINE)
    }

    /// The Lease with this candidate as its holder.
    fn renewal(&self, before: Option<&Value>, time: &str) -> Value {
        let Key { namespace, name, kind } = &self.lease;
        let mut lease = before.cloned().unwrap_or_else(|| {
            json!({
                "apiVersion": kind.api_version(), "kind": kind.name(),
                "metadata": {"name": name, "namespace": namespace},
            })
        });
        let mut spec = lease["spec"].as_object().cloned().unwrap_or_else(Map::new);
        if spec.get("holderIdentity").and_then(Value::as_str) != Some(&self.identity) {
            let transitions = spec.get("leaseTransitions").and_then(Value::as_u64);
            let transitions = before.map_or(0, |_| transitions.unwrap_or(0) + 1);
            spec.insert("leaseTransitions".to_owned(), json!(transitions));
            spec.insert("acquireTime".to_owned(), json!(time));
        }
        spec.insert("holderIdentity".to_owned(), json!(self.identity));
        spec.insert("leaseDurationSeconds".to_owned(), json!(LEASE.as_secs()));
        spec.insert("renewTime".to_owned(), json!(time));
        if let Some(fields) = lease.as_object_mut() {
            fields.insert("spec".to_owned(), Value::Object(spec));
        }
        lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tortie_api::Kind;
    use tortie_store::Written;

    fn key() -> Key {
        Key::namespaced(Kind::Lease, "tortie-system", "tortie-controllers")
    }

    fn stored(holder: &str, version: u64) -> Stored {
        let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 3, "acquireTime": "t0"});
        Stored::new(key(), json!({"metadata": {"name": "x"}, "spec": spec}), Written::at(version))
    }

    fn holder(claim: &Claim) -> Option<(&str, u64, &str)> {
        match claim {
            Claim::Create(value) | Claim::Update(value, _) => {
                let spec = &value["spec"];
                Some((
                    spec["holderIdentity"].as_str()?,
                    spec["leaseTransitions"].as_u64()?,
                    spec["acquireTime"].as_str()?,
                ))
            }
            Claim::Wait => None,
        }
    }

    #[test]
    fn a_candidate_takes_the_lease_only_when_it_has_not_changed_for_its_duration() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut election = Election::new(key(), "me");
        assert_eq!(holder(&election.claim(None, at(0), "t")), Some(("me", 0, "t")));
        // The holder's clock does not matter, only changes that are seen here.
        for (second, version, expected) in
            [(0, 1, None), (14, 1, None), (14, 2, None), (28, 2, None), (29, 2, Some(("me", 4, "t")))]
        {
            let claim = election.claim(Some(&stored("other", version)), at(second), "t");
            assert_eq!(holder(&claim), expected, "{second} {version}");
        }
        assert_eq!(holder(&election.claim(Some(&stored("", 9)), at(30), "t")), Some(("me", 4, "t")));
        assert_eq!(
            holder(&election.claim(Some(&stored("me", 9)), at(30), "t")),
            Some(("me", 3, "t0")),
            "a renewal"
        );
    }

    #[test]
    fn a_leader_stops_before_another_may_begin() {
        let start = Instant::now();
        let mut election = Election::new(key(), "me");
        assert_eq!(election.leads_until(), None);
        election.renewed(start);
        let until = election.leads_until().unwrap_or(start);
        assert!(until < start + LEASE && until > start + 2 * PERIOD);
        election.claim(Some(&stored("other", 1)), start, "t");
        assert_eq!(election.leads_until(), None, "another one has it");
    }

    #[test]
    fn a_damaged_lease_is_replaced_when_it_does_not_change() {
        let start = Instant::now();
        let mut election = Election::new(key(), "me");
        let damaged = |spec: Value| Stored::new(key(), json!({"spec": spec}), Written::at(1));
        let odd = damaged(json!({"holderIdentity": "x", "leaseDurationSeconds": "soon"}));
        assert_eq!(election.claim(Some(&odd), start, "t"), Claim::Wait);
        assert_eq!(holder(&election.claim(Some(&odd), start + LEASE, "t")), Some(("me", 1, "t")));
        assert_eq!(holder(&election.claim(Some(&damaged(json!([]))), start, "t")), Some(("me", 1, "t")));
    }
}
