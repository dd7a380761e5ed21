//! The order and the ends of tiers.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use tortie_api::calico::{TierDefault, WELL_KNOWN_TIERS};
use tortie_policy::program::EndOfTier;

/// The settings of a tier.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TierSettings {
    pub(crate) order: Option<f64>,
    pub(crate) end: EndOfTier,
}

/// The stored tiers.
#[derive(Default)]
pub(crate) struct Tiers(BTreeMap<String, TierSettings>);

impl Tiers {
    /// Ingests a tier; returns whether it has changed.
    pub(crate) fn update(&mut self, name: &str, tier: Option<TierSettings>) -> bool {
        let before = match tier.clone() {
            Some(tier) => self.0.insert(name.to_owned(), tier),
            None => self.0.remove(name),
        };
        before != tier
    }

    /// The position of a tier: known tiers before unknown ones, by order (absent is last), then by name (policy
    /// decision 7). The first of all is the tier without a name, for policies whose tier cannot be read.
    pub(crate) fn position<'a>(&self, name: &'a str) -> TierPosition<'a> {
        if name.is_empty() {
            return TierPosition { unknown: false, order: f64::NEG_INFINITY, name };
        }
        // Nobody can change the order of the tiers that every cluster has.
        let stored = || self.0.get(name).map(|tier| tier.order);
        let order = well_known(name).map(|(order, _)| Some(order)).or_else(stored);
        TierPosition { unknown: order.is_none(), order: order.flatten().unwrap_or(f64::INFINITY), name }
    }

    pub(crate) fn is_known(&self, name: &str) -> bool {
        self.0.contains_key(name) || well_known(name).is_some()
    }

    pub(crate) fn end_of(&self, name: &str) -> EndOfTier {
        match (self.0.get(name), well_known(name)) {
            (Some(tier), _) => tier.end,
            (None, Some((_, TierDefault::Pass))) => EndOfTier::Pass,
            (None, _) => EndOfTier::Deny,
        }
    }
}

fn well_known(name: &str) -> Option<(f64, TierDefault)> {
    WELL_KNOWN_TIERS.iter().find(|(tier, ..)| *tier == name).map(|(_, order, end)| (*order, *end))
}

/// The position of a tier, totally ordered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TierPosition<'a> {
    unknown: bool,
    order: f64,
    name: &'a str,
}

impl PartialEq for TierPosition<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for TierPosition<'_> {}

impl PartialOrd for TierPosition<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TierPosition<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let orders = self.order.total_cmp(&other.order);
        self.unknown.cmp(&other.unknown).then(orders).then(self.name.cmp(other.name))
    }
}
