//! The claims of Services to addresses and ports. Each address and port has one winner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::problem::{FrontendPlace, Problem};
use crate::state::{Frontend, FrontendAddress, FrontendKey, FrontendKind, ServicePortId};

/// A claim, in the order in which claims to one address and port win: by the field that it comes from, then the older Service, then by
/// name. A Service without a time of creation counts as the youngest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Claim {
    kind: FrontendKind,
    is_without_time: bool,
    created: Option<String>,
    service_port: Arc<ServicePortId>,
}

impl Claim {
    pub(crate) fn new(frontend: &Frontend, created: Option<&String>) -> Self {
        Self {
            kind: frontend.kind,
            is_without_time: created.is_none(),
            created: created.cloned(),
            service_port: frontend.service_port.clone(),
        }
    }
}

/// All claims.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_key: BTreeMap<FrontendKey, BTreeMap<Claim, Frontend>>,
    /// The keys that several ports of Services claim.
    contested: BTreeSet<FrontendKey>,
}

impl Claims {
    pub(crate) fn insert(&mut self, key: FrontendKey, claim: Claim, frontend: Frontend) {
        self.by_key.entry(key).or_default().insert(claim, frontend);
        self.note(key);
    }

    pub(crate) fn remove(&mut self, key: FrontendKey, claim: &Claim) {
        if let Some(claims) = self.by_key.get_mut(&key) {
            claims.remove(claim);
            if claims.is_empty() {
                self.by_key.remove(&key);
            }
        }
        self.note(key);
    }

    /// The frontend of a claim.
    pub(crate) fn get(&self, key: &FrontendKey, claim: &Claim) -> Option<&Frontend> {
        self.by_key.get(key)?.get(claim)
    }

    /// The frontend of the first claim.
    pub(crate) fn winner(&self, key: &FrontendKey) -> Option<&Frontend> {
        self.by_key.get(key)?.values().next()
    }

    /// A problem for each claim that another port of a Service wins.
    pub(crate) fn problems(&self) -> impl Iterator<Item = Problem> {
        let contested = self.contested.iter().filter_map(|key| Some((key, self.by_key.get(key)?)));
        contested.flat_map(|(key, claims)| {
            let winner = claims.keys().next();
            let losers = claims.keys().skip(1).filter_map(move |claim| {
                let winner = winner.filter(|winner| winner.service_port != claim.service_port)?;
                Some((claim, winner))
            });
            losers.map(|(claim, winner)| Problem::Taken {
                service: claim.service_port.service.clone(),
                address: place(key),
                protocol: key.protocol,
                port: key.port,
                winner: winner.service_port.service.clone(),
            })
        })
    }

    fn note(&mut self, key: FrontendKey) {
        let claims = self.by_key.get(&key);
        if claims.is_some_and(|claims| claims.len() > 1) {
            self.contested.insert(key);
        } else {
            self.contested.remove(&key);
        }
    }
}

fn place(key: &FrontendKey) -> FrontendPlace {
    match key.address {
        FrontendAddress::Address(address) => FrontendPlace::Address(address),
        FrontendAddress::NodePort(_) => FrontendPlace::Node,
    }
}
