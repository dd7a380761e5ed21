//! The firewall of the machine under an emulated HNS, in memory.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tortie_hcn::{Firewall, FirewallError, FirewallRule, HResult, LocalRules};

/// A firewall in memory. It lists single addresses with their mask, as Windows does.
#[derive(Default)]
pub struct EmulatedFirewall {
    state: Mutex<FirewallState>,
}

/// The rules, and how the firewall behaves.
#[derive(Debug, Clone, Default)]
pub struct FirewallState {
    /// The rules.
    pub rules: Vec<FirewallRule>,
    /// What each call fails with.
    pub fails: Option<FirewallError>,
    /// Whether rules have an effect; `None`: they have.
    pub local_rules: Option<LocalRules>,
    /// The number of calls that changed something.
    pub changes: usize,
}

impl EmulatedFirewall {
    /// Changes the firewall as an administrator does, or reads it.
    pub fn change<T>(&self, change: impl FnOnce(&mut FirewallState) -> T) -> T {
        change(&mut self.state())
    }

    fn state(&self) -> MutexGuard<'_, FirewallState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usable(&self) -> Result<MutexGuard<'_, FirewallState>, FirewallError> {
        let state = self.state();
        state.fails.clone().map_or(Ok(state), Err)
    }
}

impl Firewall for EmulatedFirewall {
    fn rules(&self) -> Result<Vec<FirewallRule>, FirewallError> {
        Ok(self.usable()?.rules.clone())
    }

    fn set(&self, rule: &FirewallRule) -> Result<(), FirewallError> {
        let mut state = self.usable()?;
        state.changes += 1;
        let single = |part: &str| part.parse::<std::net::Ipv4Addr>().is_ok();
        let listed = rule.remote_addresses.split(',').map(|part| match single(part) {
            true => format!("{part}/255.255.255.255"),
            false => part.to_owned(),
        });
        let remote_addresses = listed.collect::<Vec<_>>().join(",");
        let rule = FirewallRule { remote_addresses, ..rule.clone() };
        match state.rules.iter_mut().find(|other| other.name == rule.name) {
            Some(found) => *found = rule,
            None => state.rules.push(rule),
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), FirewallError> {
        let mut state = self.usable()?;
        state.changes += 1;
        let missing = FirewallError::Failed { operation: "remove the rule", code: HResult(0x8007_0002) };
        let found = state.rules.iter().position(|rule| rule.name == name).ok_or(missing)?;
        state.rules.remove(found);
        Ok(())
    }

    fn local_rules(&self) -> Result<LocalRules, FirewallError> {
        Ok(self.usable()?.local_rules.unwrap_or(LocalRules::Apply))
    }
}
