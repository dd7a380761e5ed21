//! A client of the store in memory that is slow, loses its connection and dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use serde_json::Value;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_store::{
    Follow, Interest, Page, PageToken, Stopped, Store, StoreError, Stored, Unfinished, Version, Write,
    Written,
};

use crate::model::memory::{Dice, Memory};

/// A client whose requests take time. It dies at some write: before it, or after it and before its answer. The same may
/// happen to the connection, which is there again after a while.
pub(crate) struct Client {
    memory: Arc<Memory>,
    dice: Arc<Dice>,
    writes_left: AtomicU64,
    /// The number of requests that fail before the connection is there again.
    failures_left: AtomicU64,
    /// Whether connections break.
    breaks: bool,
    /// Whether writes that are given together are executed together or not at all, as in etcd.
    transactions: bool,
}

impl Client {
    pub(crate) fn new(memory: Arc<Memory>, dice: Arc<Dice>, writes_left: u64, transactions: bool) -> Self {
        let (writes_left, failures_left) = (AtomicU64::new(writes_left), AtomicU64::new(0));
        Self { memory, dice, writes_left, failures_left, breaks: false, transactions }
    }

    /// With connections that break.
    pub(crate) fn breaking(self, breaks: bool) -> Self {
        Self { breaks, ..self }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.writes_left.load(Ordering::Relaxed) == 0
    }

    async fn wait(&self) -> Result<(), StoreError> {
        for _ in 0..self.dice.below(4) {
            tokio::task::yield_now().await;
        }
        if self.is_dead() {
            return Err(dead());
        }
        let left = self.failures_left.load(Ordering::Relaxed);
        if left > 0 {
            self.failures_left.store(left - 1, Ordering::Relaxed);
            return Err(StoreError::Unavailable("no connection".to_owned()));
        }
        Ok(())
    }

    /// Whether the connection breaks now.
    fn breaks_now(&self) -> bool {
        let breaks = self.breaks && self.dice.below(60) == 0;
        if breaks {
            self.failures_left.store(self.dice.below(6), Ordering::Relaxed);
        }
        breaks
    }

    async fn write<T>(&self, write: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.wait().await?;
        let left = self.writes_left.load(Ordering::Relaxed) - 1;
        self.writes_left.store(left, Ordering::Relaxed);
        if left > 0 && !self.breaks_now() {
            return write.await;
        }
        if self.dice.below(2) == 0 {
            let _ = write.await; // the answer is lost
        }
        Err(dead())
    }
}

fn dead() -> StoreError {
    StoreError::Unavailable("the caller died".to_owned())
}

#[async_trait]
impl Store for Client {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.wait().await?;
        self.memory.get(key).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.wait().await?;
        self.memory.list_page(interest, after).await
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.write(self.memory.create(key, value)).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.write(self.memory.update(key, value, expected)).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.write(self.memory.delete(key, expected)).await
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        let mut done = Vec::new();
        if self.transactions {
            let all = self.write(async { self.memory.execute_all(writes) }).await;
            return all.map_err(|error| Stopped { done: Vec::new(), error });
        }
        for write in writes {
            match self.write(async { self.memory.execute(write) }).await {
                Ok(written) => done.push(written),
                Err(error) => return Err(Stopped { done, error }),
            }
        }
        Ok(done)
    }

    async fn write_before(&self, mut first: Vec<Write>, last: Write) -> Result<Written, Unfinished> {
        let tried = first.len();
        if self.transactions {
            first.push(last);
            let all = self.write(async { self.memory.execute_all(first) }).await;
            let mut all = all.map_err(|error| Unfinished { tried: tried.min(1), error })?;
            return Ok(all.pop().expect("a result of each write"));
        }
        let mut failure = None;
        while !first.is_empty() {
            let any =
                first.swap_remove(usize::try_from(self.dice.below(first.len() as u64)).expect("an index"));
            failure = self.write(async { self.memory.execute(any) }).await.err().or(failure);
        }
        let written = match failure {
            Some(error) => Err(error),
            None => self.write(async { self.memory.execute(last) }).await,
        };
        written.map_err(|error| Unfinished { tried, error })
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        self.memory.follow(interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.memory.barrier(kinds).await
    }
}
