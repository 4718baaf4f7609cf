// Couchbase's Java client for documents, for the tests: it waits until the bucket is ready, which it learns over
// REST, and then writes, reads and removes.

import com.couchbase.client.core.env.SeedNode;
import com.couchbase.client.core.msg.kv.DurabilityLevel;
import com.couchbase.client.java.Bucket;
import com.couchbase.client.java.Cluster;
import com.couchbase.client.java.ClusterOptions;
import com.couchbase.client.java.Collection;
import com.couchbase.client.java.json.JsonObject;
import com.couchbase.client.java.kv.MutationResult;
import com.couchbase.client.java.kv.UpsertOptions;
import java.time.Duration;
import java.util.Optional;
import java.util.Set;

public class Documents {
    public static void main(String[] args) {
        SeedNode node = SeedNode.create(
            "127.0.0.1", Optional.of(Integer.valueOf(args[0])), Optional.of(Integer.valueOf(args[1])));
        Cluster cluster = Cluster.connect(Set.of(node), ClusterOptions.clusterOptions(args[2], args[3]));
        Bucket bucket = cluster.bucket("default");
        bucket.waitUntilReady(Duration.ofSeconds(60));
        Collection collection = bucket.defaultCollection();
        long sum = 0;
        for (int n = 0; n < 200; n++) {
            UpsertOptions durable = UpsertOptions.upsertOptions().durability(DurabilityLevel.MAJORITY);
            MutationResult stored = collection.upsert("java-" + n, JsonObject.create().put("n", n), durable);
            if (!stored.mutationToken().isPresent()) {
                throw new IllegalStateException("no mutation token");
            }
            sum += collection.get("java-" + n).contentAsObject().getInt("n");
        }
        collection.remove("java-0");
        System.out.printf("{\"sum\": %d, \"exists\": %b}%n", sum, collection.exists("java-0").exists());
        cluster.disconnect();
        System.exit(0);
    }
}
