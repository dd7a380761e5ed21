//! Finds the rules of profiles, which may be implicit.

use tortie_api::calico::HostEndpoint;
use tortie_api::{Key, Kind};

use super::{Oracle, Stored};

/// The source of a profile's rules.
pub enum SeenProfile<'a> {
    /// A stored object.
    Stored(&'a Stored),
    /// Implicit: the profile of a namespace, or the default of automatic host endpoints. It allows everything.
    AllowsAll,
    /// Implicit: the profile of a service account. It has no rules, and leaves the decision to the next profile.
    WithoutRules,
    /// None: the profile does not exist, and denies.
    Missing,
}

impl Oracle<'_> {
    /// The source of a profile's rules.
    pub fn profile_of(&self, name: &str) -> SeenProfile<'_> {
        match self.snapshot.get(&Key::global(Kind::Profile, name)) {
            Some(stored) => SeenProfile::Stored(stored),
            None if name == HostEndpoint::DEFAULT_ALLOW => SeenProfile::AllowsAll,
            None => match (name.strip_prefix("kns."), name.strip_prefix("ksa.")) {
                (Some(namespace), _) if self.world.namespace_exists(namespace) => SeenProfile::AllowsAll,
                (_, Some(account)) if self.account_exists(account) => SeenProfile::WithoutRules,
                _ => SeenProfile::Missing,
            },
        }
    }

    /// Whether there is a service account of this name, given as `namespace.name`.
    fn account_exists(&self, account: &str) -> bool {
        let key = account
            .split_once('.')
            .map(|(namespace, name)| Key::namespaced(Kind::ServiceAccount, namespace, name));
        key.is_some_and(|key| self.snapshot.get(&key).is_some())
    }
}
