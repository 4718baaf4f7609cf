// A consumer over Couchbase's Java client for DCP, for the tests: it streams every partition up to the high
// seqnos of the moment, checks that seqnos rise, and prints what it found as JSON.

import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.StreamFrom;
import com.couchbase.client.dcp.StreamTo;
import com.couchbase.client.dcp.highlevel.DatabaseChangeListener;
import com.couchbase.client.dcp.highlevel.Deletion;
import com.couchbase.client.dcp.highlevel.DocumentChange;
import com.couchbase.client.dcp.highlevel.Mutation;
import com.couchbase.client.dcp.highlevel.StreamFailure;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicLong;

public class Consumer {
    static final Map<Integer, Long> seqnos = new ConcurrentHashMap<>();
    static final Set<String> keys = ConcurrentHashMap.newKeySet();
    static final AtomicLong mutations = new AtomicLong(), deletions = new AtomicLong(), faults = new AtomicLong();

    static void take(DocumentChange change, AtomicLong kind) {
        Long before = seqnos.put(change.getVbucket(), change.getOffset().getSeqno());
        if (before != null && before >= change.getOffset().getSeqno()) {
            faults.incrementAndGet();
        }
        keys.add(change.getKey());
        kind.incrementAndGet();
        change.flowControlAck();
    }

    public static void main(String[] args) throws Exception {
        Client client = Client.builder()
            .seedNodes(args[0])
            .credentials(args[1], args[2])
            .bucket("default")
            .flowControl(1 << 18)
            .build();
        client.nonBlockingListener(new DatabaseChangeListener() {
            public void onMutation(Mutation mutation) {
                take(mutation, mutations);
            }

            public void onDeletion(Deletion deletion) {
                take(deletion, deletions);
            }

            public void onFailure(StreamFailure failure) {
                failure.getCause().printStackTrace();
                faults.incrementAndGet();
            }
        });
        client.connect().block();
        client.initializeState(StreamFrom.BEGINNING, StreamTo.NOW).block();
        client.startStreaming().block();
        long ends = System.nanoTime() + 240_000_000_000L;
        while (!client.sessionState().isAtEnd() && System.nanoTime() < ends) {
            Thread.sleep(20);
        }
        System.out.printf(
            "{\"partitions\": %d, \"mutations\": %d, \"deletions\": %d, \"keys\": %d, \"faults\": %d, \"done\": %b}%n",
            client.numPartitions(), mutations.get(), deletions.get(), keys.size(), faults.get(),
            client.sessionState().isAtEnd());
        client.disconnect().block();
        System.exit(0);
    }
}
