//! A session whose optimizer is sharded over ranks: every rank updates its own parameters and sends them to all others; the
//! first collects the state of all when it saves, so that checkpoints are whole.

use cluster::World;
use compute::{Device, ParamKey};

use super::session::{OPTIMIZER_PREFIX, Session};
use super::traits::Task;
use crate::error::{Result, TrainerError};

/// Bytes of a state that travel together.
const PIECE_BYTES: usize = 16 << 20;

/// What the first rank says to those that wait for it.
const GO_ON: u8 = 0;
const SEND_STATE: u8 = 1;

impl<'a, T: Task> Session<'a, T> {
    /// Replaces all parameters, and what began with them, by those of the first rank.
    pub fn take_weights(&mut self, world: &World) -> Result<()> {
        // A sharded optimizer begins with zeros, and every rank has other names of it.
        let is_sharded = self.shard.is_some();
        let is_shared = |name: &str| !is_sharded || !name.starts_with(OPTIMIZER_PREFIX);
        for (_, tensor) in self.state_dict()?.into_iter().filter(|(name, _)| is_shared(name)) {
            let mut bytes = Vec::with_capacity(tensor.bytes());
            tensor.write_to(&mut bytes).map_err(|error| unreadable(&error))?;
            tensor.write_bytes(&send_bytes(world, bytes, 0)?);
        }
        Ok(())
    }

    /// Replaces every parameter by that of the rank that has updated it.
    pub fn gather_weights(&mut self, world: &World) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        let all: Vec<ParamKey> = self.adapters.params.keys().collect();
        let owner = |key: &&ParamKey| shard.owner(key.index());
        let of = |rank: usize| -> Vec<ParamKey> {
            all.iter().filter(|key| owner(key) == rank).copied().collect()
        };
        let by_rank: Vec<Vec<ParamKey>> = (0..world.size()).map(of).collect();
        for (rank, keys) in by_rank.iter().enumerate() {
            let start = |bytes| world.start_broadcast(bytes, rank);
            self.in_buckets(keys, Self::param_bytes, start, |session, key, bytes| {
                session.adapters.params.values_mut()?[key.index()].write_bytes(bytes);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn param_bytes(&self, key: ParamKey) -> Result<Vec<u8>> {
        let param = self.adapters.params.get(key);
        let mut bytes = Vec::with_capacity(param.bytes());
        param.write_to(&mut bytes).map_err(|error| unreadable(&error))?;
        Ok(bytes)
    }

    /// Before a checkpoint: collects the state of all ranks in main memory, if they are in [`Self::send_state`].
    pub fn collect_state(&mut self) -> Result<()> {
        let Some(world) = self.collected_from else { return Ok(()) };
        world.broadcast(vec![SEND_STATE], 0)?;
        self.make_room()?;
        self.exchange_state(world)?;
        self.is_state_whole = true;
        Ok(())
    }

    /// Frees what was collected.
    pub fn drop_collected(&mut self) -> Result<()> {
        let Some(shard) = self.shard.as_ref().filter(|_| self.is_state_whole) else {
            return Ok(());
        };
        for key in self.adapters.params.keys().filter(|key| !shard.is_own(key.index())) {
            let nothing = self.adapters.params.get(key).device().zeros([1], compute::Dtype::F32)?;
            self.optimizer.make_room(key.index(), &nothing)?;
        }
        self.is_state_whole = false;
        Ok(())
    }

    /// Until [`Self::end_collecting`], all other ranks send their state whenever it is saved here.
    pub fn begin_collecting(&mut self, world: &'a World) {
        self.collected_from = Some(world).filter(|_| self.shard.is_some());
    }

    /// Tells ranks that send their state that none is wanted any more.
    pub fn end_collecting(&mut self) -> Result<()> {
        if let Some(world) = self.collected_from.take() {
            world.broadcast(vec![GO_ON], 0)?;
        }
        Ok(())
    }

    /// Sends this rank's state to the first as often as that asks for it.
    pub fn send_state(&mut self, world: &World) -> Result<()> {
        while self.shard.is_some() && world.broadcast(vec![GO_ON], 0)? == [SEND_STATE] {
            self.exchange_state(world)?;
        }
        Ok(())
    }

    /// Memory for the state of other ranks.
    fn make_room(&mut self) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        let keys: Vec<ParamKey> = self.adapters.params.keys().collect();
        let others = keys.iter().filter(|key| !shard.is_own(key.index()));
        for key in others {
            let shape = self.adapters.params.get(*key).shape();
            // A parameter of zeros, and at most two values for each of it; each in memory of its own, so that freeing one
            // frees it.
            let host = Device::cpu(1, 4 * (4 * shape.elements() + (1 << 14)))?;
            let like = host.zeros(shape, compute::Dtype::F32)?;
            self.optimizer.make_room(key.index(), &like)?;
        }
        Ok(())
    }

    /// Sends the state of every parameter that the first rank does not hold to it.
    fn exchange_state(&mut self, world: &World) -> Result<()> {
        let Some(shard) = &self.shard else { return Ok(()) };
        for key in self.adapters.params.keys() {
            let owner = shard.owner(key.index());
            if owner == 0 {
                continue;
            }
            for tensor in self.optimizer.tensors_of(key.index()) {
                let mut bytes = Vec::new();
                if owner == world.rank() {
                    tensor.write_to(&mut bytes).map_err(|error| unreadable(&error))?;
                }
                let bytes = send_bytes(world, bytes, owner)?;
                if world.rank() == 0 {
                    tensor.write_bytes(&bytes);
                }
            }
        }
        Ok(())
    }
}

/// Bytes of one rank to all, which do not know how many there are.
fn send_bytes(world: &World, mut bytes: Vec<u8>, from: usize) -> Result<Vec<u8>> {
    let n = world.broadcast((bytes.len() as u64).to_le_bytes().to_vec(), from)?;
    bytes.resize(n.try_into().map_or(0, u64::from_le_bytes) as usize, 0);
    for piece in bytes.chunks_mut(PIECE_BYTES) {
        piece.copy_from_slice(&world.broadcast(piece.to_vec(), from)?);
    }
    Ok(bytes)
}

fn unreadable(error: &std::io::Error) -> TrainerError {
    TrainerError::OtherRank { rank: 0, problem: format!("its device: {error}") }
}
