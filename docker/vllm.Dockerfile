# kvfold in vLLM's own image. From the root of the repository:
#   docker build --file docker/vllm.Dockerfile --tag kvfold-vllm .
#   docker run --gpus all --ipc host --publish 8000:8000 --volume kvfold:/data kvfold-vllm Qwen/Qwen3-8B --recipe saw-int4
FROM vllm/vllm-openai:v0.32.0

COPY pyproject.toml README.md LICENSE /opt/kvfold/
COPY src /opt/kvfold/src
# The image has the vLLM that the extra asks for, so pip leaves it as it is.
RUN pip install --no-cache-dir "/opt/kvfold[vllm]" && kvfold --version

# Models, artifacts and compiled kernels outlive the container.
ENV HF_HOME=/data/huggingface KVFOLD_CACHE=/data/kvfold TRITON_CACHE_DIR=/data/triton
VOLUME /data
EXPOSE 8000
ENTRYPOINT ["kvfold", "serve"]
